"""Control runs: with something wrong in KV, waits, bytes or logits, the reproduction must say so and end."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from kvlane.bench.lab import Answer, Lab
from kvlane.bench.measuring import MAX_LOGIT_DIFFERENCE, WrongAnswerError
from kvlane.bench.scenarios import Scenario, measure
from kvlane.bench.shape import random_prompt
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.engines.transformers_forward import KvLayer
from kvlane.streams.executor import LayerLoad
from kvlane.transfer.host_run import HostRun

LOADS = ("bulk load", "layered load", "prefix split", "choice")


def run(kit, small, *names, reps=1, reference=None, planner=None):
    """The named conditions beside a recompute, on a link on which the policy loads a part."""
    if reference is None:
        names = ("recompute", *names)
    scenario = Scenario("A", "a control", kit.tokens, kit.tokens, names)
    planner = planner or small.planner(kit.middling_link)
    return measure(
        scenario,
        small.lab,
        small.store,
        small.ids,
        planner,
        reps,
        reference,
        small.spec,
        lambda what, work: None,
    )


def late_copies(monkeypatch, seconds=0.01):
    """Copies of every layer but the first begin late, so that a race for them is always lost."""
    copy_piece = CpuBackend._copy_piece

    def late(self, destination, source, piece):
        if piece.layer:
            time.sleep(seconds)
        copy_piece(self, destination, source, piece)

    monkeypatch.setattr(CpuBackend, "_copy_piece", late)


def tamper(monkeypatch, lab, change):
    """Makes every load of a lab answer right and then changes the answer."""
    for name in ("load", "choose"):
        answer = getattr(lab, name)
        monkeypatch.setattr(lab, name, lambda *arguments, answer=answer: change(answer(*arguments)))


def changed(answer: Answer, **result) -> Answer:
    return replace(answer, result=replace(answer.result, **result))


@pytest.mark.parametrize("name", LOADS)
class TestRightAnswers:
    """The runs below without what is wrong in them."""

    def test_pass(self, kit, small, name):
        recompute, load = run(kit, small, name, reps=2)
        assert len(load.answers) == len(load.logit_differences) == len(load.alone) == 2
        assert {a.result.first_token for a in load.answers} == {small.reference.result.first_token}
        assert max(load.logit_differences) <= MAX_LOGIT_DIFFERENCE
        assert recompute.logit_differences == [0.0, 0.0]

    def test_pass_with_late_copies(self, kit, small, name, monkeypatch):
        late_copies(monkeypatch)
        run(kit, small, name)

    def test_pass_against_an_answer_of_another_scenario(self, kit, small, name):
        (load,) = run(kit, small, name, reference=small.reference)
        assert load.condition.name == name


@pytest.mark.parametrize("name", LOADS)
class TestStoredKv:
    def test_zeroed_is_noticed(self, kit, small, name):
        memory, _ = small.stored()
        memory[:] = 0
        with pytest.raises(WrongAnswerError, match=f"scenario A, {name}"):
            run(kit, small, name)

    @pytest.mark.parametrize("layer", range(3))
    def test_one_layers_values_zeroed_are_noticed(self, kit, small, name, layer):
        memory, region = small.stored()
        first, last = region.value_offset(layer), region.value_offset(layer, region.capacity_tokens)
        assert memory[first:last].any()
        memory[first:last] = 0
        with pytest.raises(WrongAnswerError, match=f"scenario A, {name}"):
            run(kit, small, name)

    def test_one_run_of_bytes_flipped_is_noticed(self, kit, small, name):
        memory, region = small.stored()
        at = region.value_offset(1, 5)
        memory[at : at + 64] ^= 0x40
        with pytest.raises(WrongAnswerError, match=f"scenario A, {name}"):
            run(kit, small, name)

    def test_another_prompts_is_noticed(self, kit, small, name):
        memory, _ = small.stored()
        other = random_prompt(kit.shape, kit.tokens, seed=3)
        small.lab.recompute(other)
        rows = small.lab.engine.layer_bytes(0, kit.usable)
        memory[:] = np.concatenate([part for layer in rows for part in layer])
        with pytest.raises(WrongAnswerError, match=f"scenario A, {name}"):
            run(kit, small, name)


@pytest.mark.parametrize("name", LOADS)
class TestGuardsTakenAway:
    def test_a_prefix_length_reported_late_is_noticed(self, kit, small, name, monkeypatch):
        length = KvLayer.get_seq_length
        monkeypatch.setattr(KvLayer, "get_seq_length", lambda self: length(self) if self._updates else 0)
        with pytest.raises(WrongAnswerError, match=f"scenario A, {name}"):
            run(kit, small, name)

    def test_a_wait_left_out_is_noticed(self, kit, small, name, monkeypatch):
        late_copies(monkeypatch)
        monkeypatch.setattr(LayerLoad, "hold", lambda self, layer: None)
        with pytest.raises(WrongAnswerError, match=f"scenario A, {name}"):
            run(kit, small, name)

    def test_a_layer_that_is_counted_and_not_copied_is_noticed(self, kit, small, name, monkeypatch):
        copy_piece = CpuBackend._copy_piece

        def partly(self, destination, source, piece):
            if piece.layer != 1:
                copy_piece(self, destination, source, piece)

        monkeypatch.setattr(CpuBackend, "_copy_piece", partly)
        with pytest.raises(WrongAnswerError, match=f"scenario A, {name}"):
            run(kit, small, name)

    def test_bytes_that_are_copied_and_not_counted_are_noticed(self, kit, small, name, monkeypatch):
        count = HostRun.count_moved
        monkeypatch.setattr(HostRun, "count_moved", lambda self, nbytes: count(self, nbytes - 4))
        with pytest.raises(WrongAnswerError, match=rf"scenario A, {name}: \d+ bytes moved, planned"):
            run(kit, small, name)


class TestComparison:
    """One wrong value in an answer that is otherwise right."""

    @pytest.mark.parametrize("name", LOADS)
    def test_another_first_token_is_refused(self, kit, small, name, monkeypatch):
        wrong = small.reference.result.first_token + 1
        tamper(monkeypatch, small.lab, lambda answer: changed(answer, first_token=wrong))
        with pytest.raises(
            WrongAnswerError, match=f"{name}: first token {wrong}, without stored KV {wrong - 1}"
        ):
            run(kit, small, name)

    @pytest.mark.parametrize("name", LOADS)
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_one_logit_that_is_no_number_is_refused(self, kit, small, name, bad, monkeypatch):
        def spoil(answer):
            logits = answer.result.logits.copy()
            logits[7] = bad
            return changed(answer, logits=logits)

        tamper(monkeypatch, small.lab, spoil)
        with pytest.raises(WrongAnswerError, match=f"{name}: logits differ by (nan|inf)"):
            run(kit, small, name)

    def test_a_reference_of_nan_is_refused(self, kit, small):
        nothing = np.full_like(small.reference.result.logits, np.nan)
        with pytest.raises(WrongAnswerError, match="logits differ by nan"):
            run(kit, small, "bulk load", reference=changed(small.reference, logits=nothing))

    @pytest.mark.parametrize(("off", "passes"), [(0.9, True), (1.1, False), (-1.1, False)])
    def test_a_logit_may_be_off_by_rounding_only(self, kit, small, off, passes, monkeypatch):
        def shift(answer):
            # Against the reference itself, so that the path's own rounding is not in it.
            logits = small.reference.result.logits.copy()
            logits[7] += off * MAX_LOGIT_DIFFERENCE
            return changed(answer, logits=logits)

        tamper(monkeypatch, small.lab, shift)
        if passes:
            (load,) = run(kit, small, "bulk load", reference=small.reference)
            assert load.logit_differences == [pytest.approx(off * MAX_LOGIT_DIFFERENCE, rel=1e-2)]
        else:
            with pytest.raises(WrongAnswerError, match=r"at most 0\.0001"):
                run(kit, small, "bulk load", reference=small.reference)

    @pytest.mark.parametrize("name", LOADS)
    def test_bytes_that_the_plan_did_not_say_are_refused(self, kit, small, name):
        # KV is stored in four bytes an element, and this policy believes in two.
        planner = small.planner(kit.middling_link / 2, kv_dtype="fp16")
        with pytest.raises(WrongAnswerError, match=rf"scenario A, {name}: \d+ bytes moved, planned \d+"):
            run(kit, small, name, planner=planner)

    def test_a_wrong_answer_in_the_last_repetition_only_is_noticed(self, kit, small, monkeypatch):
        wrong = small.reference.result.first_token + 1
        seen: list[Answer] = []

        def third(answer):
            seen.append(answer)
            return changed(answer, first_token=wrong) if len(seen) == 3 else answer

        tamper(monkeypatch, small.lab, third)
        with pytest.raises(WrongAnswerError, match=f"choice: first token {wrong}"):
            run(kit, small, "choice", reps=3)
        assert len(seen) == 3

    def test_the_answer_given_for_comparison_is_the_one_compared_with(self, kit, small):
        other = small.lab.recompute(random_prompt(kit.shape, kit.tokens, seed=3))
        with pytest.raises(WrongAnswerError, match="bulk load"):
            run(kit, small, "bulk load", reference=other)


class TestCommand:
    """The same through the command: one line, status 1, and no result that somebody could believe."""

    def check(self, kvlane_bench, tmp_path, *arguments):
        shape = ("--tokens", 640, "--layers", 2, "--hidden", 32, "--ffn", 48, "--vocab", 160)
        done = kvlane_bench("reproduce", *shape, "--reps", 1, "--out", tmp_path, *arguments)
        assert done.returncode == 1
        assert done.stdout == ""
        *steps, last = done.stderr.splitlines()
        assert last.startswith("kvlane-bench: wrong answer: scenario A, ")
        assert not any("kvlane-bench" in step or "Traceback" in step for step in steps)
        assert list(tmp_path.iterdir()) == []

    def test_kv_zeroed(self, kvlane_bench, tmp_path, monkeypatch):
        keep = Lab.keep

        def zeroed(self, store, ids, tokens):
            keep(self, store, ids, tokens)
            hit = store.lookup(self.engine.identity, ids)
            with store.open(hit, 0, hit.tokens) as stored:
                stored.memory[:] = 0

        monkeypatch.setattr(Lab, "keep", zeroed)
        self.check(kvlane_bench, tmp_path)

    def test_a_wait_left_out(self, kvlane_bench, tmp_path, monkeypatch):
        late_copies(monkeypatch)
        monkeypatch.setattr(LayerLoad, "hold", lambda self, layer: None)
        self.check(kvlane_bench, tmp_path)
