"""Training, checkpoints and weights files."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from workbench.models import train as training
from workbench.models.dit import DiTConfig, VideoDiT
from workbench.models.loss import flow_matching_loss
from workbench.models.sampler import sample
from workbench.models.train import train
from workbench.models.trainer import TrainConfig, Trainer
from workbench.models.weights import load_model, save_model, training_record
from workbench.paths import data_dir

TINY = DiTConfig(depth=1, width=32, heads=1, head_dim=16)
SETTINGS = TrainConfig(
    model=TINY, steps=6, batch=2, warmup=1, learning_rate=5e-3, log_every=2,
    grids=(((1, 4, 4), 0.5), ((2, 3, 5), 0.5)),
)  # fmt: skip


def test_steps_on_one_batch_lower_its_loss():
    trainer = Trainer(SETTINGS, "cpu")
    video, label = trainer.batch()

    def loss() -> float:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(9)
            many = video.repeat(16, 1, 1, 1, 1), label.repeat(16)
            return flow_matching_loss(trainer.model, *many, generator).item()

    before = loss()
    for _ in range(30):
        trainer.step = 0  # keep the learning rate up
        trainer.train_step(video, label)
    assert loss() < 0.8 * before


def test_the_loss_is_zero_for_the_true_velocity_alone():
    video = 2 * torch.rand(4, 2, 4, 4, 3, generator=torch.Generator().manual_seed(0)) - 1

    class Oracle(VideoDiT):
        def forward(self, x, time, label, **_):
            return (x - video) / time.view(-1, 1, 1, 1, 1)

    generator = torch.Generator().manual_seed(0)
    label = torch.zeros(4, dtype=torch.long)
    assert flow_matching_loss(Oracle(TINY), video, label, generator) < 1e-8
    assert flow_matching_loss(VideoDiT(TINY), video, label, generator) > 0.5


def test_the_learning_rate_warms_up_and_falls_to_one_percent():
    trainer = Trainer(TrainConfig(model=TINY, steps=100, warmup=10, learning_rate=1.0), "cpu")
    rates = []
    for trainer.step in range(101):
        rates.append(trainer.learning_rate())
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9]
    assert rates[100] == pytest.approx(0.01)


def test_a_time_limit_ends_the_schedule():
    trainer = Trainer(TrainConfig(model=TINY, steps=1000, minutes=1.0), "cpu")
    trainer.seconds = 30.0
    assert trainer.progress() == pytest.approx(0.5)
    trainer.seconds = 61.0
    assert trainer.progress() == 1.0


def test_some_labels_are_dropped():
    trainer = Trainer(TrainConfig(model=TINY, batch=64, grids=(((1, 1, 1), 1.0),)), "cpu")
    labels = torch.cat([trainer.batch()[1] for _ in range(10)])
    share = (labels == TINY.null_label).float().mean()
    assert 0.05 < share < 0.16


def test_a_resumed_run_equals_one_without_a_break(tmp_path):
    whole = Trainer(SETTINGS, "cpu")
    for _ in range(4):
        whole.train_step(*whole.batch())
    first = Trainer(SETTINGS, "cpu")
    for _ in range(2):
        first.train_step(*first.batch())
    first.save(tmp_path)
    second = Trainer(SETTINGS, "cpu")
    second.resume(tmp_path / "checkpoint.pt")
    for _ in range(2):
        second.train_step(*second.batch())
    assert second.step == 4
    for name in ("model", "average"):
        resumed, unbroken = (getattr(t, name).state_dict() for t in (second, whole))
        assert all(torch.equal(resumed[key], unbroken[key]) for key in unbroken)


def test_a_run_writes_weights_that_load_and_the_record_of_how_they_came(tmp_path):
    record = train(SETTINGS, tmp_path, device="cpu", sheet=False)
    assert record["steps"] == 6
    assert math.isfinite(record["loss"])
    assert training_record(tmp_path / "tiny_video_dit.safetensors")["seed"] == 0
    curve = json.loads((tmp_path / "training.json").read_text())["curve"]
    assert [step for step, _ in curve] == [2, 4, 6]
    model = load_model(tmp_path / "tiny_video_dit.safetensors")
    assert model.config == TINY
    assert torch.isfinite(sample(model, labels=[0], grid=(1, 2, 2), steps=2)).all()
    again = train(SETTINGS, tmp_path / "b", device="cpu", sheet=False,
                  start_from=tmp_path / "tiny_video_dit.safetensors")  # fmt: skip
    assert again["loss"] < record["loss"]


def test_a_run_says_that_it_samples_before_it_does(tmp_path, monkeypatch, capsys):
    said = []
    monkeypatch.setattr(
        training, "write_sheet", lambda *a, **k: said.append(capsys.readouterr().out)
    )
    train(replace(SETTINGS, steps=1), tmp_path, device="cpu")
    count = training.PER_CLASS * TINY.classes
    (before,) = said
    assert before.endswith(
        f"sampling {count} videos for the sheet {tmp_path}/contact_sheet.png ...\n"
    )


def test_the_help_of_the_training_names_its_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        training.main(["--help"])
    text = capsys.readouterr().out
    defaults = TrainConfig()
    for name in ("steps", "batch", "learning_rate", "warmup", "time_shift", "seed", "log_every"):
        option = name.replace("_", "-")
        found = re.search(rf"^  --{option} [^[]+\[default: (\S+)\]", text, re.MULTILINE)
        assert found is not None, option
        assert float(found[1]) == getattr(defaults, name)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"batch": -1}, {"minutes": 0.0}])
def test_a_run_of_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainConfig(**wrong)


def test_saved_weights_come_back_at_bf16(tmp_path):
    torch.manual_seed(0)
    model = VideoDiT(TINY)
    save_model(model, tmp_path / "m.safetensors", record={"steps": 3})
    loaded = load_model(tmp_path / "m.safetensors")
    assert not loaded.training
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor.bfloat16().float())
    assert training_record(tmp_path / "m.safetensors") == {"steps": 3}
    assert load_model(tmp_path / "m.safetensors", dtype=torch.bfloat16).embed.weight.dtype == (
        torch.bfloat16
    )


def test_a_missing_weights_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors"):
        load_model(tmp_path / "nothing.safetensors")
    with pytest.raises(FileNotFoundError, match="checkpoint"):
        Trainer(SETTINGS, "cpu").resume(tmp_path / "checkpoint.pt")


def test_a_truncated_weights_file_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    save_model(VideoDiT(TINY), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated"):
        load_model(path)


def test_a_file_of_another_format_is_refused(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="format is None"):
        load_model(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("embed.weight"), "missing keys"),
        (lambda state: state.update(more=torch.zeros(1)), "unexpected keys"),
        (lambda state: state.update({"embed.bias": torch.zeros(3)}), "embed.bias has shape"),
    ],
)
def test_weights_that_do_not_fit_their_configuration_are_refused(tmp_path, change, message):
    path = tmp_path / "m.safetensors"
    save_model(VideoDiT(TINY), path)
    state = load_file(path)
    change(state)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(state, path, metadata=metadata)
    with pytest.raises(ValueError, match=message):
        load_model(path)


def test_the_bundled_weights_are_small_and_make_finite_video():
    path = data_dir() / "tiny_video_dit.safetensors"
    assert path.stat().st_size <= 12_000_000
    model = load_model()
    assert training_record()["steps"] > 1000
    video = sample(model, labels=["star"], steps=2, guidance=1)
    assert video.shape == (1, 16, 64, 64, 3)
    assert torch.isfinite(video).all()
    assert video.std() > 0.05
