// What the last two minutes looked like: differences between snapshots, each a second apart.

export const PATHS = ["load", "recompute", "split"];
export const WINDOW_S = 120;

/** Decisions per second by path, of one deployment or of all where `name` is "". */
export class History {
  constructor() {
    this.snapshots = [];
  }

  /** Takes a snapshot; after a restart counting begins anew. */
  add(live) {
    const last = this.snapshots.at(-1);
    if (last && (last.started_s !== live.started_s || last.at_s > live.at_s)) this.snapshots = [];
    const counts = new Map(live.deployments.map(({ name, decisions }) => [name, decisions]));
    this.snapshots.push({ at_s: live.at_s, started_s: live.started_s, counts });
    // One more than the window holds, for the difference at its edge.
    while (this.snapshots.length > 2 && this.snapshots[1].at_s < live.at_s - WINDOW_S) this.snapshots.shift();
  }

  /** [{ at_s, from_s, load, recompute, split }], rates over the time between two snapshots. */
  rates(name) {
    const found = [];
    for (let index = 1; index < this.snapshots.length; index += 1) {
      const [before, after] = [this.snapshots[index - 1], this.snapshots[index]];
      const long = after.at_s - before.at_s;
      if (long <= 0) continue;
      const each = { from_s: before.at_s, at_s: after.at_s };
      for (const path of PATHS) {
        let more = 0;
        for (const [deployment, decisions] of after.counts) {
          if (name !== "" && deployment !== name) continue;
          more += Math.max(0, decisions[path] - (before.counts.get(deployment)?.[path] ?? 0));
        }
        each[path] = more / long;
      }
      found.push(each);
    }
    return found;
  }
}
