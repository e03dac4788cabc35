"""The end of a program waits until the last collectives have released their tensors."""

from __future__ import annotations

import threading

import torch

from muonckpt.ranks import release


def test_the_end_waits_for_a_thread_that_still_holds_an_alias_and_not_for_the_tensor():
    tensor, may_go = torch.arange(4), threading.Event()
    held = [release.in_flight(tensor)]
    assert held[0].data_ptr() == tensor.data_ptr() and held[0] is not tensor
    seen: list[bool] = []

    def hold() -> None:
        may_go.wait()
        seen.append(ended.is_set())
        held.clear()

    ended = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    end = threading.Thread(target=lambda: (release._await_release(), ended.set()))
    end.start()
    may_go.set()
    thread.join()
    end.join()
    assert seen == [False] and not any(alias() is not None for alias in release._last_aliases)


def test_an_alias_that_is_released_is_not_waited_for(monkeypatch):
    release.in_flight(torch.arange(4))
    monkeypatch.setattr("time.sleep", lambda seconds: (_ for _ in ()).throw(AssertionError("it waits")))
    release._await_release()
