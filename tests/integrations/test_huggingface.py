"""transformers' Trainer with the script of its page: trained, saved, and resumed on the same and on the other world."""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
import warnings
from contextlib import chdir, redirect_stdout
from functools import partial
from io import BytesIO, StringIO
from multiprocessing import active_children
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import sweep
from support.accelerated import accelerated
from support.failing import raised, told_by
from support.pages import distance, recipe, script, uninterrupted_runs, whole
from support.workers import run
from torch.distributed.tensor import DTensor

import muonckpt
from muonckpt import SourceError
from muonckpt.integrations.saved import check_saved
from muonckpt.optimizer.groups import LLAMA, LORA, Rule, sort_parameters

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra 'integrations')")

from muonckpt.integrations.huggingface import RULES, SaveOnSignal, last_whole, muon  # noqa: E402

FSDP = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
KINDS = {"plain": {}, "fsdp2": FSDP}
BATCH = 4


def train(rank: int, world: int, kind: str, folder: str, resume: str | None = None, **arguments: Any) -> dict[str, Any]:
    """The script; whole parameters, and the names of the state of each."""
    told = StringIO()
    with (
        accelerated(rank, world, fsdp=kind == "fsdp2"),
        warnings.catch_warnings(record=True) as caught,
        redirect_stdout(told),
    ):
        warnings.simplefilter("always")
        options = {"disable_tqdm": True} | KINDS[kind] | arguments
        trainer = script("huggingface.md")["build"](folder, BATCH // world, **options)
        trainer.train(resume_from_checkpoint=resume)
        parameters = dict(trainer.model.named_parameters())
        state = trainer.optimizer.state
        return {
            "parameters": {name: whole(parameter) for name, parameter in parameters.items()},
            "slots": {name: sorted(state[parameter]) for name, parameter in parameters.items()},
            "sharded": {isinstance(parameter, DTensor) for parameter in parameters.values()},
            "sharing": list(trainer.optimizer.optimizer.schedules),
            "rates": [group["initial_lr"] for group in trainer.optimizer.param_groups],
            "warned": [str(warning.message) for warning in caught],
            "told": [line for line in told.getvalue().splitlines() if line.startswith("resumed")],
        }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[tuple[str, int], tuple[Path, dict[str, Any]]]:
    return uninterrupted_runs(train, KINDS, lambda: tmp_path_factory.mktemp("run"))


def test_matrices_are_stepped_by_muon_and_the_rest_by_adamw(uninterrupted):
    for kind, world in uninterrupted:
        _, result = uninterrupted[kind, world]
        for name, slots in result["slots"].items():
            matrix = "proj" in name
            assert slots == (["momentum_buffer"] if matrix else ["exp_avg", "exp_avg_sq", "step"]), name
        assert sorted(result["rates"]) == [0.003, 0.02]
        assert result["sharded"] == {kind == "fsdp2"}
        assert result["sharing"] == [tuple(range(world))], "ranks share the matrices out"


def test_two_ranks_train_as_one_process(uninterrupted):
    _, alone = uninterrupted["plain", 1]
    for case in (("plain", 2), ("fsdp2", 2), ("fsdp2", 1)):
        assert distance(alone, uninterrupted[case][1]) < 2e-6


RESUMED = [(kind, *ranks) for kind in KINDS for ranks in ((2, 1), (1, 2), (2, 2), (1, 1))]


@pytest.mark.parametrize(("kind", "saved", "resumed"), sweep(RESUMED, *RESUMED[::3]))
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(uninterrupted, kind, saved, resumed, tmp_path):
    folder, _ = uninterrupted[kind, saved]
    result = run(resumed, train, kind, str(tmp_path), str(folder / "checkpoint-3"))[0]
    gap = distance(result, uninterrupted[kind, resumed][1])
    assert gap == 0 if saved == resumed else gap < 2e-6
    [told] = result["told"]
    assert told.startswith(f"resumed from step 3, saved on {saved} rank"), told
    assert f", now {resumed}, proved: 56 tensors and " in told
    assert "requires_grad" not in told


class Sender(transformers.TrainerCallback):
    """Sends this process signals, each amid a step."""

    def __init__(self, numbers: dict[int, signal.Signals]) -> None:
        self.numbers = numbers

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 in self.numbers:
            signal.raise_signal(self.numbers[state.global_step + 1])


def preempted(rank: int, world: int, folder: str) -> object:
    """The script; one rank gets a signal in step 2, the other one in step 5."""
    with accelerated(rank, world, fsdp=False):
        trainer = script("huggingface.md")["build"](folder, BATCH // world, disable_tqdm=True)
        trainer.add_callback(SaveOnSignal(on=(signal.SIGTERM, signal.SIGUSR2)))
        trainer.add_callback(Sender([{5: signal.SIGTERM}, {2: signal.SIGUSR2}][rank]))
        try:
            trainer.train()
        except SystemExit as ended:
            return ended.code
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_a_signal_to_any_rank_is_a_checkpoint_and_the_run_goes_on_from_it(uninterrupted, tmp_path):
    assert run(2, preempted, str(tmp_path)) == [75, 75]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{step}" for step in (2, 3, 5)]
    result = run(2, train, "plain", str(tmp_path / "on"), str(tmp_path / "checkpoint-5"))[0]
    assert distance(result, uninterrupted["plain", 2][1]) == 0


class Launcher(transformers.TrainerCallback):
    """Sends SIGTERM to the workers of data loaders, as a launcher does, and to no processes of other tests."""

    def __init__(self) -> None:
        self.others = {*active_children()}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            for child in {*active_children()} - self.others:
                child.terminate()


def test_workers_of_the_loader_outlive_a_signal(tmp_path):
    trainer = script("huggingface.md")["build"](
        str(tmp_path), 1, disable_tqdm=True, dataloader_num_workers=1, dataloader_prefetch_factor=1
    )
    callback = SaveOnSignal(on=(signal.SIGTERM,))
    for added in (callback, Launcher()):
        trainer.add_callback(added)
    try:
        assert trainer.train().global_step == 6
    finally:
        callback.on_train_end(None, None, None)


def regrouped(rank: int, world: int, folder: str, resume: str, fresh: list[str]) -> tuple[str, dict[str, float], str]:
    """The script, resumed with some matrices moved to AdamW: its error, the counts of steps, and its warnings."""
    names = script("huggingface.md")
    moved = [[Rule("embedding", "*.down_proj.weight")], LLAMA]
    names["muon"] = lambda **options: muon(rules=moved, fresh=fresh, **options)
    with accelerated(rank, world, fsdp=False), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = names["build"](folder, BATCH // world, disable_tqdm=True)
        told = raised(lambda: trainer.train(resume_from_checkpoint=resume))
        state = {name: trainer.optimizer.state[parameter] for name, parameter in trainer.model.named_parameters()}
        counts = {name: slots["step"].item() for name, slots in state.items() if "step" in slots}
        return told, counts, "\n".join(str(warning.message) for warning in caught)


@pytest.mark.parametrize("ranks", sweep([1, 2], 2))
def test_parameters_that_moved_to_adamw_start_fresh_by_name(uninterrupted, ranks, tmp_path):
    saved = str(uninterrupted["plain", 2][0] / "checkpoint-3")
    told, counts, warned = run(ranks, regrouped, str(tmp_path / "a"), saved, ["*.down_proj.*"])[0]
    assert told == "no error"
    assert {count for name, count in counts.items() if "down_proj" in name} == {3}
    assert {count for name, count in counts.items() if "down_proj" not in name} == {6}
    assert "state starts fresh: 2 (model.layers.*.mlp.down_proj.weight)" in warned
    told, _, _ = run(ranks, regrouped, str(tmp_path / "b"), saved, [])[0]
    assert "2 parameters differ: moved from 'muon' to 'adamw': model.layers.*.mlp.down_proj.weight" in told


def with_another_rate(rank: int, world: int, folder: str, resume: str) -> tuple[list[str], list[float]]:
    """The script with another rate in its code: what warnings say of that, and the rates that were given."""
    names = script("huggingface.md")
    names["muon"] = lambda **options: muon(**options | {"lr": 0.5})
    with accelerated(rank, world, fsdp=False):
        trainer = names["build"](folder, BATCH // world, disable_tqdm=True)
        told = told_by(lambda: trainer.train(resume_from_checkpoint=resume))
        return told, sorted(group["initial_lr"] for group in trainer.optimizer.param_groups)


def test_a_rate_of_the_code_that_a_resume_overrides_is_told_once(uninterrupted, tmp_path):
    saved = str(uninterrupted["plain", 2][0] / "checkpoint-3")
    (told, rates), (other, _) = run(2, with_another_rate, str(tmp_path), saved)
    assert (len(told), len(other), rates) == (1, 0, [3e-3, 0.02])
    assert "(muon): lr=0.02, not 0.5" in told[0] and "adamw" not in told[0]


def frozen(rank: int, world: int, folder: str, resume: str, fresh: list[str]) -> tuple[str, set[float]]:
    """The script, resumed with a norm frozen: its error, and the counts of steps."""
    names = script("huggingface.md")
    whole = names["LlamaForCausalLM"]

    def without_the_norm(config: Any) -> torch.nn.Module:
        model = whole(config)
        model.model.norm.requires_grad_(False)
        return model

    names["LlamaForCausalLM"], names["muon"] = without_the_norm, lambda **options: muon(fresh=fresh, **options)
    with accelerated(rank, world, fsdp=False):
        trainer = names["build"](folder, BATCH // world, disable_tqdm=True)
        told = raised(lambda: trainer.train(resume_from_checkpoint=resume))
        return told, {slots["step"].item() for slots in trainer.optimizer.state.values() if "step" in slots}


@pytest.mark.filterwarnings("ignore:resuming with fresh", "ignore:resumed from step 3, .* not as it was saved")
def test_what_the_refusal_says_is_what_the_trainer_takes(uninterrupted, tmp_path):
    """Only the checkpoint has the parameter: accelerate loads the optimizer's own state into it first."""
    saved = str(uninterrupted["plain", 1][0] / "checkpoint-3")
    told, _ = run(1, frozen, str(tmp_path / "a"), saved, [])[0]
    assert "only in the checkpoint: model.norm.weight" in told and told.endswith(", or to muon(...) in a Trainer")
    globs = eval(told.partition("fresh=")[2].partition(")")[0])
    assert run(1, frozen, str(tmp_path / "b"), saved, globs)[0] == ("no error", {6})


def test_without_its_optimizer_a_resumed_run_is_another_one_and_says_so(uninterrupted, tmp_path):
    """So the distances above would show lost momentum."""
    folder, result = uninterrupted["plain", 1]
    shutil.copytree(folder / "checkpoint-3", tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / "optimizer.pt").unlink()
    resumed = run(1, train, "plain", str(tmp_path / "out"), str(tmp_path / "checkpoint-3"))[0]
    assert distance(resumed, result) > 1e-3
    [told] = (text for text in resumed["warned"] if "not as it was saved" in text)
    assert ": other elements than were saved" in told and "scheduler.last_epoch: 3 -> 0" in told
    assert not resumed["told"]


def train_with(rank: int, world: int, folder: str, resume: str | None, arguments: dict[str, Any]) -> dict[str, Any]:
    return train(rank, world, "plain", folder, resume, **arguments)


def test_a_model_that_was_saved_alone_begins_the_rest_anew_and_the_warning_says_so(tmp_path):
    run(1, train_with, str(tmp_path), None, {"save_only_model": True})
    resumed = run(1, train, "plain", str(tmp_path / "out"), str(tmp_path / "checkpoint-3"))[0]
    [told] = (text for text in resumed["warned"] if "begins from zero" in text)
    assert "at step 3" in told and "muon's of 14 parameters, adamw's of 7 parameters" in told and "warm-up" in told


PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "eval_strategy": "steps",
    "eval_steps": 4,
    "metric_for_best_model": "eval_loss",
}


def plateau(rank: int, world: int, folder: str, resume: str | None = None) -> dict[str, Any]:
    """The script with a schedule that has not begun when the checkpoint is saved."""
    texts = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": text, "labels": text} for text in texts]
    trainer, arguments = transformers.Trainer, transformers.TrainingArguments
    with (
        patch.object(transformers, "Trainer", partial(trainer, eval_dataset=data)),
        patch.object(transformers, "TrainingArguments", lambda folder, **given: arguments(folder, **given | PLATEAU)),
    ):
        return train(rank, world, "plain", folder, resume)


def test_a_schedule_that_has_not_begun_is_no_lost_optimizer(tmp_path):
    result = run(1, plateau, str(tmp_path))[0]
    resumed = run(1, plateau, str(tmp_path / "out"), str(tmp_path / "checkpoint-3"))[0]
    assert distance(resumed, result) == 0
    assert "proved: 56 tensors and " in resumed["told"][0]
    assert not any("goes on" in text or "not as it was saved" in text for text in resumed["warned"])


def adapters(rank: int, world: int, folder: str, resume: str | None = None) -> dict[str, Any]:
    """The script with adapters of peft in the model; the trained parameters, and the names of the state of each."""
    from peft import LoraConfig, get_peft_model

    names = script("huggingface.md")
    whole_model = names["LlamaForCausalLM"]
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj", "embed_tokens"])
    names["LlamaForCausalLM"] = lambda config: get_peft_model(whole_model(config), lora)
    refused = raised(lambda: names["build"](folder, BATCH // world).create_optimizer())
    names["muon"] = lambda **options: muon(rules=[LORA], **options)
    with accelerated(rank, world, fsdp=False):
        trainer = names["build"](folder, BATCH // world, disable_tqdm=True)
        trainer.train(resume_from_checkpoint=resume)
        trained = {name: param for name, param in trainer.model.named_parameters() if param.requires_grad}
        slots = {name: sorted(trainer.optimizer.state[param]) for name, param in trained.items()}
    return {"parameters": {name: whole(param) for name, param in trained.items()}, "slots": slots, "refused": refused}


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers. to .True.")  # peft, of what it saves
def test_adapters_are_matrices_by_one_layer_of_rules_and_resume_exactly(tmp_path):
    pytest.importorskip("peft")
    result = run(1, adapters, str(tmp_path / "a"))[0]
    assert "lora_A.default.weight (2 alike) [4, 16] in Linear: no rule selects it" in result["refused"]
    for name, slots in result["slots"].items():
        assert slots == (["exp_avg", "exp_avg_sq", "step"] if "embedding" in name else ["momentum_buffer"]), name
    resumed = run(1, adapters, str(tmp_path / "b"), str(tmp_path / "a" / "checkpoint-3"))[0]
    assert distance(resumed, result) == 0


class Damage(transformers.TrainerCallback):
    """Overwrites the middle of a file of a checkpoint that has just been saved."""

    def __init__(self, part: str) -> None:
        self.part = part

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.distributed.barrier()
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / self.part
            content = path.read_bytes()
            middle = slice(len(content) // 3, len(content) * 2 // 3)
            path.write_bytes(content[: middle.start] + b"\xff" * (middle.stop - middle.start) + content[middle.stop :])


def damaged(rank: int, world: int, kind: str, folder: str, part: str) -> str:
    with accelerated(rank, world, fsdp=kind == "fsdp2"):
        trainer = script("huggingface.md")["build"](folder, BATCH // world, disable_tqdm=True, **KINDS[kind])
        trainer.callback_handler.callbacks.insert(0, Damage(part))
        return raised(trainer.train)


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("plain", "optimizer.pt"),
        ("plain", "model.safetensors"),
        ("fsdp2", "optimizer_0/__0_0.distcp"),
        ("fsdp2", "scheduler.pt"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_told_on_all_ranks_when_it_is_saved(kind, part, tmp_path):
    for told in run(2, damaged, kind, str(tmp_path), part):
        assert "checkpoint-3 is not whole" in told and part.split("/")[0] in told
    with pytest.raises(SourceError, match=r"expected a whole checkpoint .* found none; move these away to begin"):
        last_whole(tmp_path)


def train_slowly(rank: int, world: int, folder: str) -> str:
    """The script; the second rank's file of random numbers comes in two writes."""
    real_save = torch.save

    def save(value: Any, file: Any, *options: Any, **choices: Any) -> None:
        if rank == 0 or "rng_state" not in str(file):
            real_save(value, file, *options, **choices)
            return
        buffer = BytesIO()
        real_save(value, buffer)
        content = buffer.getvalue()
        with Path(file).open("wb") as opened:
            opened.write(content[: len(content) // 2])
            opened.flush()
            time.sleep(0.3)
            opened.write(content[len(content) // 2 :])

    with patch.object(torch, "save", save):
        return raised(train, rank, world, "plain", folder)


def test_nothing_is_read_back_while_another_rank_writes(tmp_path):
    assert run(2, train_slowly, str(tmp_path)) == ["no error", "no error"]


def test_a_killed_save_is_passed_over_by_name(uninterrupted, tmp_path):
    folder, _ = uninterrupted["plain", 2]
    assert last_whole(tmp_path / "nothing") is None
    for left in ([], ["model.safetensors"], ["model.safetensors", "optimizer.pt", "trainer_state.json"]):
        here = tmp_path / str(len(left))
        (here / "checkpoint-6").mkdir(parents=True)
        for name in left:
            content = (folder / "checkpoint-6" / name).read_bytes()
            (here / "checkpoint-6" / name).write_bytes(content[: len(content) // 2])
        assert last_whole(here) is None, "it was never finished, so the run begins"
        shutil.copytree(folder / "checkpoint-3", here / "checkpoint-3")
        with pytest.warns(RuntimeWarning, match=r"checkpoint-6 is not whole \(trainer_state.json: .*checkpoint-3"):
            assert last_whole(here) == str(here / "checkpoint-3")
    assert last_whole(folder) == str(folder / "checkpoint-6")


def test_a_save_that_was_killed_before_all_ranks_had_written_is_passed_over(uninterrupted, tmp_path):
    """The Trainer writes its state on the first rank, whatever the others do; it has the record of the last save."""
    folder, _ = uninterrupted["plain", 2]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    state["stateful_callbacks"]["VerifySaved"]["step"] = 3
    (tmp_path / "checkpoint-6" / "trainer_state.json").write_text(json.dumps(state))
    assert last_whole(tmp_path) == str(tmp_path / "checkpoint-6")
    (tmp_path / "checkpoint-6" / "rng_state_1.pth").unlink()
    with pytest.warns(RuntimeWarning, match=r"checkpoint-6 is not whole \(rng_state_1.pth: not there\)"):
        assert last_whole(tmp_path) == str(tmp_path / "checkpoint-3")


def begin(rank: int, world: int, folder: str, is_first: bool) -> tuple[str, list[float]]:
    """The script, with the Trainer's AdamW, or begun from that: what is told, and the rates of the first step."""
    rates: list[list[float]] = []
    with accelerated(rank, world, fsdp=False), chdir(folder), redirect_stdout(StringIO()) as told:
        names = script("huggingface.md")
        if is_first:
            names["Trainer"] = lambda *given, optimizer_cls_and_kwargs, **others: transformers.Trainer(*given, **others)
        trainer = names["build"]("adamw-run" if is_first else "muon-run", BATCH // world, disable_tqdm=True)
        if not is_first:
            names |= {"muonckpt": muonckpt, "TrainerCallback": transformers.TrainerCallback}
            recipe("huggingface.md", "class Begin(TrainerCallback):", names)
            trainer.add_callback(names["Begin"])
            step = partial(lambda *_: rates.append(sorted(g["lr"] for g in trainer.optimizer.param_groups)))
            trainer.create_optimizer().register_step_pre_hook(step)
        trainer.train()
        if is_first and rank == 0:  # the names, which the Trainer does not write
            name_of = {parameter: name for name, parameter in trainer.model.named_parameters()}
            order = [name_of[parameter] for group in trainer.optimizer.param_groups for parameter in group["params"]]
            Path("adamw-run", "checkpoint-3", "parameter_names.json").write_text(json.dumps(order))
        assert trainer.state.global_step == 6
        return told.getvalue(), rates[0] if rates else []


def test_a_run_begins_from_one_of_adamw_as_the_page_says(tmp_path):
    run(2, begin, str(tmp_path), True)
    (tmp_path / "adamw-run" / "checkpoint-3").rename(tmp_path / "adamw-run" / "checkpoint-40")
    told, rates = run(1, begin, str(tmp_path), False)[0]
    counts = "the state of 7 parameters goes on, that of 14 begins at zero; schedules are at their step 3"
    assert f"begun from adamw-run/checkpoint-40: 21 weights loaded; {counts}" in told, told
    factor = 0.5 * (1 + math.cos(math.pi * 0.25))  # one of four steps after two of warm-up
    assert rates == pytest.approx([factor * 3e-3, factor * 0.02])
    assert [path.name for path in (tmp_path / "muon-run").glob("checkpoint-*")] == ["checkpoint-6"], "as of one run"


def with_own_buffers(rank: int, world: int, folder: str, resume: str | None = None) -> list[str]:
    """The script with a buffer that differs from rank to rank, as statistics of a batch do: its warnings."""
    names = script("huggingface.md")
    whole_model = names["LlamaForCausalLM"]

    def with_buffer(config: Any) -> torch.nn.Module:
        model = whole_model(config)
        model.register_buffer("seen", torch.tensor([float(rank)]))
        return model

    names["LlamaForCausalLM"] = with_buffer
    with accelerated(rank, world, fsdp=False), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = names["build"](folder, BATCH // world, disable_tqdm=True, ddp_broadcast_buffers=False)
        trainer.train(resume_from_checkpoint=resume)
        return [str(warning.message) for warning in caught if warning.category is RuntimeWarning]


def test_a_run_that_cannot_be_recorded_goes_on_with_a_warning(tmp_path):
    told, told_elsewhere = run(2, with_own_buffers, str(tmp_path))
    assert len(told) == 2 and all("nothing will prove a resume from it: " in text and "seen" in text for text in told)
    assert not told_elsewhere
    saved = last_whole(tmp_path)
    assert saved == str(tmp_path / "checkpoint-6")
    [told, *_], _ = run(2, with_own_buffers, str(tmp_path), str(tmp_path / "checkpoint-3"))
    assert "goes on at step 3 from a checkpoint of which VerifySaved has no record" in told


def test_a_folder_without_a_checkpoint_is_told(tmp_path):
    with pytest.raises(SourceError, match=r"expected what a trainer saves .* found none"):
        check_saved(tmp_path)


def test_a_model_of_an_unknown_family_is_sorted_by_its_modules():
    factory, options = muon(lr=0.02, adamw_lr=3e-4)
    groups = factory()(torch.nn.Linear(4, 4), **options).param_groups
    assert [(group["algorithm"], group["param_names"]) for group in groups] == [
        ("muon", ["weight"]),
        ("adamw", ["bias"]),
    ]


@pytest.mark.parametrize("name", RULES)
def test_rules_of_a_family_sort_its_models(name):
    config = transformers.AutoConfig.for_model(
        name, hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=128, num_attention_heads=8
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    kinds = {decision.kind for decision in sort_parameters(model, RULES[name])}
    assert {"matrix", "embedding", "head", "vector"} <= kinds
