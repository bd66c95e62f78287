"""The thread that asks a store: order, what it hands over, and when it is there at all."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from kvlane.streams.cpu import CpuBackend
from kvlane.streams.faults import StoreSilentError
from kvlane.streams.store_thread import StoreThread
from kvlane.transfer.store import KvSafetyError

SOON_S, LONG_S = 0.02, 20.0


@pytest.fixture
def backend():
    with CpuBackend() as backend:
        yield backend


@pytest.fixture
def store(backend):
    return StoreThread(backend, "store-disk", LONG_S)


class Standing:
    """A call that stands still until `go`, and then returns its name."""

    def __init__(self, name="late"):
        self.name = name
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.go.wait(60)
        return self.name


@pytest.fixture
def standing():
    call = Standing()
    yield call
    call.go.set()


def gone(timeout_s=LONG_S):
    """Whether the thread ends."""
    until = time.monotonic() + timeout_s
    while any(t.name == "kvlane-store-disk" for t in threading.enumerate()):
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


class TestThread:
    def test_is_one_for_calls_that_follow_one_another(self, store, monkeypatch):
        monkeypatch.setattr("kvlane.streams.store_thread.LINGER_S", LONG_S)
        found = {store.wait(store.ask("look", threading.get_ident), LONG_S) for _ in range(20)}
        assert len(found) == 1
        assert threading.get_ident() not in found
        assert not gone(0.05)
        # It is the wait under way that is long.
        monkeypatch.setattr("kvlane.streams.store_thread.LINGER_S", SOON_S)
        store.wait(store.ask("look", threading.get_ident), LONG_S)
        assert gone()

    def test_ends_when_there_is_nothing_to_do_and_another_comes_when_there_is(self, store):
        assert store.wait(store.ask("look", lambda: 7), LONG_S) == 7
        assert gone()
        assert store.wait(store.ask("look", lambda: 8), LONG_S) == 8
        assert gone()

    def test_does_what_it_is_given_in_order(self, store):
        done = []
        asked = [store.ask("note", lambda at=at: done.append(at)) for at in range(50)]
        for each in asked:
            store.wait(each, LONG_S)
        assert done == list(range(50))

    def test_keeps_nothing_of_its_last_call(self, store, monkeypatch):
        monkeypatch.setattr("kvlane.streams.store_thread.LINGER_S", 0.5)

        class Thing: ...

        thing = Thing()
        seen = weakref.ref(thing)
        assert store.wait(store.ask("hand over", lambda thing=thing: thing), LONG_S) is thing
        del thing
        until = time.monotonic() + LONG_S
        while seen() is not None:
            assert time.monotonic() < until
            time.sleep(0.001)


class TestSilence:
    def test_lets_who_waited_go_and_keeps_others_from_asking(self, store, standing):
        with pytest.raises(StoreSilentError, match="no answer within"):
            store.wait(store.ask("open", standing), SOON_S)
        with pytest.raises(StoreSilentError, match="not asked: its open has been under way for"):
            store.ask("lookup", lambda: pytest.fail("it was asked"))
        standing.go.set()
        assert gone()
        assert store.wait(store.ask("lookup", lambda: "hit"), LONG_S) == "hit"

    def test_puts_away_what_comes_too_late(self, store, standing):
        away: list[str] = []
        with pytest.raises(StoreSilentError):
            store.wait(store.ask("open", standing, away.append), SOON_S)
        assert away == []
        standing.go.set()
        assert gone()
        assert away == ["late"]

    def test_puts_away_what_nobody_waited_for_to_the_end(self, store, standing, monkeypatch):
        away: list[str] = []
        asked = store.ask("open", standing, away.append)

        def interrupted(timeout):
            raise KeyboardInterrupt

        monkeypatch.setattr(asked.done, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.wait(asked, LONG_S)
        standing.go.set()
        assert gone()
        assert away == ["late"]

    def test_puts_away_what_came_just_before_who_waited_was_called_away(self, store, monkeypatch):
        away: list[str] = []
        asked = store.ask("open", lambda: "run", away.append)
        wait = asked.done.wait

        def interrupted(timeout):
            assert wait(timeout)
            raise KeyboardInterrupt

        monkeypatch.setattr(asked.done, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.wait(asked, LONG_S)
        assert gone()
        assert away == ["run"]

    @pytest.mark.parametrize("error", [OSError("odd"), SystemExit(), KeyboardInterrupt()])
    def test_ends_also_where_putting_away_goes_wrong(self, store, standing, error):
        def refuse(run):
            raise error

        with pytest.raises(StoreSilentError):
            store.wait(store.ask("open", standing, refuse), SOON_S)
        standing.go.set()
        assert gone()
        assert store.wait(store.ask("lookup", lambda: "hit"), LONG_S) == "hit"

    def test_keeps_nothing_of_an_error_that_came_too_late(self, store, standing):
        class Thing: ...

        seen = []

        def refuse():
            thing = Thing()
            seen.append(weakref.ref(thing))
            standing()
            raise OSError(thing)

        gc.collect()
        gc.disable()
        try:
            with pytest.raises(StoreSilentError):
                store.wait(store.ask("lookup", refuse), SOON_S)
            standing.go.set()
            assert gone()
            assert seen[0]() is None
        finally:
            gc.enable()

    def test_is_over_once_the_call_has_come_back(self, store, standing):
        """The next one may take its time again, and others wait for it."""
        with pytest.raises(StoreSilentError):
            store.wait(store.ask("open", standing), SOON_S)
        standing.go.set()
        assert gone()
        slow = Standing("slow")
        first = store.ask("open", slow)
        assert slow.begun.wait(LONG_S)
        behind = store.ask("lookup", lambda: "hit")
        slow.go.set()
        assert (store.wait(first, LONG_S), store.wait(behind, LONG_S)) == ("slow", "hit")

    def test_ends_what_has_not_begun(self, store, standing):
        first = store.ask("open", standing)
        behind = store.ask("lookup", lambda: pytest.fail("it was begun"))
        assert standing.begun.wait(LONG_S)
        with pytest.raises(StoreSilentError, match=r"no answer within .*: its open has been under way for"):
            store.wait(behind, SOON_S)
        standing.go.set()
        # Who has patience has the answer, whatever others have made of it meanwhile.
        assert store.wait(first, LONG_S) == "late"
        assert gone()

    def test_is_known_from_a_call_that_nobody_waits_for(self, backend, standing):
        store = StoreThread(backend, "store-disk", SOON_S)
        store.post("close", standing, 0.0)
        assert standing.begun.wait(LONG_S)
        time.sleep(2 * SOON_S)
        with pytest.raises(StoreSilentError, match="not asked: its close has been under way for"):
            store.ask("lookup", lambda: "hit")
        standing.go.set()
        assert gone()

    def test_is_not_what_a_call_raised(self, store):
        away: list[str] = []
        error = OSError("no index")

        def refuse():
            raise error

        asked = store.ask("lookup", refuse, away.append)
        with pytest.raises(OSError, match="no index") as caught:
            store.wait(asked, LONG_S)
        assert caught.value is error
        assert store.wait(store.ask("lookup", lambda: "hit"), LONG_S) == "hit"
        assert away == []


class TestPosts:
    def test_are_done_when_it_returns(self, store):
        for at in range(20):
            done: list[object] = []
            store.post("close", lambda done=done, at=at: done.append(at), LONG_S)
            assert done == [at]

    def test_behind_a_call_that_stands_still_are_done_after_it(self, store, standing):
        done = []
        with pytest.raises(StoreSilentError):
            store.wait(store.ask("open", standing), SOON_S)
        for at in range(3):
            store.post("close", lambda at=at: done.append(at), LONG_S)
        assert done == []
        standing.go.set()
        assert gone()
        assert done == [0, 1, 2]

    def test_that_stand_still_are_waited_for_once(self, store, standing):
        done = []
        store.post("close", standing, SOON_S)
        assert standing.begun.wait(LONG_S)
        store.post("close", lambda: done.append("behind"), SOON_S)
        # Or this test would take three times as long as it may.
        for _ in range(3):
            store.post("close", lambda: done.append("behind"), 3 * LONG_S)
        assert done == []
        standing.go.set()
        assert gone()
        assert done == ["behind"] * 4

    def test_are_done_here_where_no_thread_can_be_had(self, backend, store):
        backend.close()
        ran = []
        store.post("close", lambda: ran.append(threading.get_ident()), LONG_S)
        assert ran == [threading.get_ident()]
        with pytest.raises(KvSafetyError, match="closed"):
            store.ask("lookup", lambda: "hit")

    def test_and_questions_go_on_after_a_thread_could_not_be_had(self, backend, store, monkeypatch):
        def refuse(task, name):
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(backend, "start", refuse)
            with pytest.raises(RuntimeError, match="new thread"):
                store.ask("lookup", lambda: pytest.fail("it was asked"))
        assert store.wait(store.ask("lookup", lambda: "hit"), LONG_S) == "hit"


class TestNoThread:
    """What was to be one never comes, or comes too late, or cannot be had."""

    def test_is_replaced_once_somebody_has_waited_for_it(self, backend, store, monkeypatch):
        late = []
        done: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(backend, "start", lambda task, name: late.append(task))
            with pytest.raises(StoreSilentError, match="no answer within"):
                store.wait(store.ask("lookup", lambda: pytest.fail("it was asked")), SOON_S)
        slow = Standing("slow")
        first = store.ask("open", slow)
        assert slow.begun.wait(LONG_S)
        store.post("close", lambda: done.append(threading.get_ident()), 0.0)
        # Here it comes after all, and leaves what there is to do to the other one.
        late[0]()
        assert done == []
        slow.go.set()
        assert store.wait(first, LONG_S) == "slow"
        assert gone()
        assert len(done) == 1
        assert done[0] != threading.get_ident()

    def test_that_comes_late_does_what_there_is_to_do(self, backend, store, monkeypatch):
        late, done = [], []
        with monkeypatch.context() as patch:
            patch.setattr(backend, "start", lambda task, name: late.append(task))
            asked = store.ask("lookup", lambda: pytest.fail("it was asked"))
            store.post("close", lambda: done.append("closed"), 0.0)
            with pytest.raises(StoreSilentError):
                store.wait(asked, SOON_S)
        late[0]()
        assert done == ["closed"]

    def test_is_not_what_an_interrupt_means_once_it_is_there(self, backend, store, standing, monkeypatch):
        away: list[str] = []
        start = backend.start

        def interrupted(task, name):
            start(task, name)
            assert standing.begun.wait(LONG_S)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(backend, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.ask("open", standing, away.append)
        with pytest.raises(StoreSilentError, match="not asked: its open has been under way for"):
            store.ask("lookup", lambda: pytest.fail("it was asked"))
        behind: list[bool] = []
        store.post("close", lambda: behind.append(standing.go.is_set()), LONG_S)
        time.sleep(SOON_S)
        standing.go.set()
        assert gone()
        assert behind == [True]
        assert away == ["late"]

    def test_leaves_nobody_waiting_who_counted_on_it(self, backend, store, monkeypatch):
        done = []
        others = []

        def refuse(task, name):
            others.append(store.ask("lookup", lambda: pytest.fail("it was asked")))
            store.post("close", lambda: done.append("closed"), 0.0)
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(backend, "start", refuse)
            with pytest.raises(RuntimeError, match="new thread"):
                store.ask("lookup", lambda: pytest.fail("it was asked"))
        assert done == ["closed"]
        with pytest.raises(StoreSilentError, match="not asked: can't start new thread"):
            store.wait(others[0], LONG_S)


def test_many_who_ask_at_once_each_have_their_own_answer(backend, store):
    wrong = []

    def one(name):
        for at in range(200):
            if store.wait(store.ask("look", lambda at=at: (name, at)), LONG_S) != (name, at):
                wrong.append((name, at))

    threads = [threading.Thread(target=one, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert gone()
