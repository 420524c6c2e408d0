"""Watching inside other people's training loops."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.watching import callbacks, open_run

KEY = "attn/layer_00/entropy_mean"


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random token sequences to learn by heart."""

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(number)
        tokens = torch.randint(50, (self.length,), generator=random)
        return {"input_ids": tokens, "labels": tokens}


def gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=50,
        n_layer=2,
        n_embd=32,
        n_head=4,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def huggingface(
    folder: Path, callback: Any, more: tuple[Any, ...] = (), **options: Any
) -> tuple[Any, nn.Module]:
    """A Trainer that has trained, and its model."""
    import transformers

    arguments = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **options,
    }
    model = gpt2()
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(str(folder), **arguments),
        train_dataset=Tokens(),
        eval_dataset=Tokens(length=5),  # rows that see less: their entropy would show
        callbacks=[*more, callback],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the Trainer's own: schedulers, checkpoints
        trainer.train()
    return trainer, model


def test_transformers_trainer_logs_what_the_heads_do(tmp_path: Path) -> None:
    callback = callbacks.trainer(every=2, run=tmp_path / "run")
    trainer, model = huggingface(tmp_path, callback)
    logged = [line for line in trainer.state.log_history if KEY in line]
    assert [line["step"] for line in logged] == [2, 4, 6]
    assert all(0 < line[KEY] < 3 for line in logged)
    run = open_run(tmp_path / "run")
    assert run.steps == [0, 2, 4]
    assert run.ended
    assert {row["kind"] for row in run.heads()} == {"self"}
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_accumulated_batches_are_one_entry_and_evaluation_leaves_no_trace(tmp_path: Path) -> None:
    seen: dict[str, int] = {}
    for name, options in {
        "plain": {"per_device_train_batch_size": 8},
        "accumulated": {"gradient_accumulation_steps": 2},
        "evaluating": {
            "per_device_train_batch_size": 8,
            "eval_strategy": "steps",
            "eval_steps": 1,
        },
    }.items():
        torch.manual_seed(0)
        callback = callbacks.trainer(every=1, rows=None)
        trainer, _ = huggingface(tmp_path / name, callback, max_steps=3, **options)
        assert all("loss" in line for line in trainer.state.log_history if KEY in line)
        assert callback.watch is not None
        seen[name] = len(callback.watch.series)
        entropy = [entry.table["entropy_mean"] for entry in callback.watch.series]
        if name == "plain":
            expected = torch.tensor(entropy)
        torch.testing.assert_close(torch.tensor(entropy), expected, rtol=1e-3, atol=1e-3)
    assert set(seen.values()) == {3}


def test_the_batches_of_an_accumulated_step_all_count() -> None:
    model, follower = hw.nn.MultiHeadAttention(16, 4), callbacks.LoopFollower(every=1, rows=None)
    batches = torch.randn(2, 1, 6, 16) * torch.tensor([0.1, 9.0]).reshape(2, 1, 1, 1)
    follower.begin(model, 0)
    for batch in batches:
        follower.before_step()
        model(batch)
    together = follower.after_step()[KEY]
    apart = []
    for batch in batches:
        with hw.watch(model) as seen:
            model(batch)
        apart.append(seen.scalars()[KEY])
    follower.end()
    assert together == pytest.approx(sum(apart) / 2)
    assert apart[0] != pytest.approx(apart[1], rel=0.1)


def test_reporters_hear_of_it_where_it_comes_first(tmp_path: Path) -> None:
    import transformers

    class Reporter(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.heard: set[str] = set()

        def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.heard |= set(given["logs"])

    for first in (False, True):
        reporter, callback = Reporter(), callbacks.trainer(every=1)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=1, logging_steps=1, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=gpt2(), args=arguments, train_dataset=Tokens(), callbacks=[reporter, callback]
        )
        if first:
            callback.first(trainer)
        trainer.train()
        assert (KEY in reporter.heard) == first


@pytest.mark.filterwarnings("ignore")  # Lightning's own advice about loggers and workers
def test_lightning_logs_what_the_heads_do(tmp_path: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.attention = hw.nn.MultiHeadAttention(16, 4)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return self.attention(batch).square().mean()

        def validation_step(self, batch: Tensor, _: int) -> None:
            self.attention(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    data = torch.utils.data.DataLoader(torch.randn(16, 8, 16), batch_size=2)
    callback = callbacks.lightning(every=2, run=tmp_path / "run", rows=None)
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=2, callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", default_root_dir=tmp_path, val_check_interval=2,
    )  # fmt: skip
    trainer.fit(module, data, data)
    run = open_run(tmp_path / "run")
    assert run.steps == [0, 2]  # 8 batches are 4 steps
    assert {row["name"] for row in run.heads()} == {"attention"}
    assert float(trainer.callback_metrics[KEY]) > 0
    assert not any("forward" in part.__dict__ for part in module.modules())


def test_a_run_that_fails_leaves_what_it_saw_and_the_model_as_it_was(tmp_path: Path) -> None:
    follower = callbacks.LoopFollower(every=1, run=tmp_path / "run")
    model = hw.nn.MultiHeadAttention(16, 4)
    follower.begin(model, 0)
    follower.before_step()
    model(torch.randn(1, 5, 16))
    follower.after_step()
    follower.before_step()
    follower.end()  # what on_exception says
    assert "forward" not in model.__dict__
    assert open_run(tmp_path / "run").steps == [0]


def test_an_interrupted_trainer_trains_again(tmp_path: Path) -> None:
    import transformers

    class Interruption(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.left = 1

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 2 and self.left:
                self.left -= 1
                raise KeyboardInterrupt

    callback = callbacks.trainer(every=1, run=tmp_path / "run")
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=gpt2(), args=arguments, train_dataset=Tokens(), callbacks=[callback, Interruption()]
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    run = open_run(tmp_path / "run")
    assert run.steps == [0, 1, 2, 3]
    assert run.ended
    assert callback.watch is not None
    assert not callback.watch.attached


def test_importing_the_callbacks_imports_no_framework() -> None:
    code = (
        "import sys; hidden = ('transformers', 'lightning', 'pytorch_lightning', 'pyarrow')\n"
        "sys.modules |= dict.fromkeys(hidden); import headwise.watching.callbacks"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""
