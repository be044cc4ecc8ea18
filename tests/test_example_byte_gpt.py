"""The example's parts that must be exact for a resumed run to be the same run: corpus, loader, model, schedule, events."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.byte_gpt.corpus import Corpus, standard_library
from examples.byte_gpt.events import EventWriter
from examples.byte_gpt.job import Job, JobConfig, tensors_digest
from examples.byte_gpt.loader import LoaderMismatchError, ShufflingLoader
from examples.byte_gpt.model import ByteGPT, ModelSize

TINY = JobConfig(
    steps=8,
    warmup_steps=3,
    batch_size=2,
    corpus_bytes=20_000,
    threads=1,
    model=ModelSize(context=16, width=32, layers=2, heads=2, dropout=0.2),
)


@pytest.fixture(autouse=True)
def _restore_torch_globals():
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def corpus_of(count: int) -> Corpus:
    data = torch.arange(count, dtype=torch.int64).to(torch.uint8)
    return Corpus(data, f"sha256:{count}")


def loader_of(samples: int = 11, batch_size: int = 2, seed: int = 5) -> ShufflingLoader:
    return ShufflingLoader(corpus_of(samples * 4 + 1), context=4, batch_size=batch_size, seed=seed)


def take(loader: ShufflingLoader, count: int) -> list[tuple[int, ...]]:
    return [next(loader).samples for _ in range(count)]


class TestCorpus:
    def test_files_are_ordered_by_path_and_cut(self, tmp_path: Path):
        for name, text in {
            "b.py": "BBBB",
            "a/z.py": "AAAA",
            "c.txt": "no",
            "test/t.py": "no",
            "a/site-packages/s.py": "no",
        }.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert bytes(standard_library(100, tmp_path).data.tolist()) == b"AAAABBBB"
        assert bytes(standard_library(6, tmp_path).data.tolist()) == b"AAAABB"

    def test_digest_is_of_the_bytes_that_are_used(self, tmp_path: Path):
        (tmp_path / "a.py").write_text("one")
        whole, cut = standard_library(3, tmp_path), standard_library(2, tmp_path)
        assert whole.digest != cut.digest
        (tmp_path / "a.py").write_text("onetwo")
        assert standard_library(3, tmp_path).digest == whole.digest

    def test_a_place_without_sources_is_an_error(self, tmp_path: Path):
        with pytest.raises(FileNotFoundError, match="no Python source"):
            standard_library(100, tmp_path)

    def test_this_interpreters_library_is_large_enough(self):
        corpus = standard_library(1 << 20)
        assert corpus.data.shape == (1 << 20,)
        assert corpus.data.dtype == torch.uint8


class TestLoader:
    def test_each_epoch_visits_every_window_once_in_another_order(self):
        loader = loader_of(samples=12)
        first, second = (sum(take(loader, 6), ()) for _ in range(2))
        assert sorted(first) == sorted(second) == list(range(12))
        assert first != second

    def test_targets_are_the_inputs_one_byte_on(self):
        batch = next(loader_of())
        assert batch.inputs.dtype == torch.int64
        assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        assert batch.inputs[:, 0].tolist() == [4 * sample for sample in batch.samples]
        assert batch.targets[:, -1].tolist() == [4 * sample + 4 for sample in batch.samples]

    @pytest.mark.parametrize("used", range(13))
    def test_c86_a_resumed_loader_repeats_and_skips_nothing(self, used: int):
        """From any position, in the middle of an epoch, at its end and in later epochs (5 batches each)."""
        reference = take(loader_of(), 20)
        stopped = loader_of()
        assert take(stopped, used) == reference[:used]
        resumed = loader_of(seed=999)
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        assert take(resumed, 20 - used) == reference[used:]

    def test_the_saved_state_is_a_copy(self):
        loader = loader_of()
        state = loader.state_dict()
        before = json.dumps(state)
        take(loader, 12)
        assert json.dumps(state) == before

    def test_c80_the_global_generators_are_neither_used_nor_disturbed(self):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        orders = [take(loader_of(), 7)]
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(2)
        orders.append(take(loader_of(), 7))
        assert orders[0] == orders[1]

    @pytest.mark.parametrize("other", [loader_of(samples=13), loader_of(batch_size=3)])
    def test_other_data_is_refused_and_changes_nothing(self, other: ShufflingLoader):
        saved = loader_of()
        take(saved, 3)
        before = other.state_dict()
        with pytest.raises(LoaderMismatchError, match="saved"):
            other.load_state_dict(saved.state_dict())
        assert other.state_dict() == before

    def test_less_than_one_batch_is_refused(self):
        with pytest.raises(ValueError, match="less than one batch"):
            loader_of(samples=2, batch_size=3)


class TestModel:
    def test_no_logit_sees_a_later_byte(self):
        torch.manual_seed(0)
        model = ByteGPT(TINY.model).eval()
        inputs = torch.randint(256, (1, 16))
        changed = inputs.clone()
        changed[0, 9] = (changed[0, 9] + 1) % 256
        before, after = model(inputs), model(changed)
        assert torch.equal(before[:, :9], after[:, :9])
        assert not torch.equal(before[:, 9:], after[:, 9:])

    def test_c94_head_and_embedding_are_one_tensor(self):
        model = ByteGPT(TINY.model)
        assert model.head.weight is model.embedding.weight

    def test_dropout_draws_from_the_global_generator(self):
        """Otherwise a restored run would not need it, and the demonstration would prove less than it says."""
        model = ByteGPT(TINY.model)
        inputs = torch.zeros(1, 16, dtype=torch.int64)
        torch.manual_seed(3)
        first, second = model(inputs), model(inputs)
        torch.manual_seed(3)
        assert not torch.equal(first, second)
        assert torch.equal(first, model(inputs))


class TestJob:
    def test_two_jobs_are_equal_in_every_bit(self):
        runs = []
        for _ in range(2):
            job = Job(TINY)
            runs.append(([job.train_one() for _ in range(TINY.steps)], job.digests()))
        assert runs[0] == runs[1]

    def test_another_seed_is_another_run(self):
        one, other = Job(TINY), Job(replace(TINY, seed=99))
        assert one.train_one() != other.train_one()
        assert one.digests()["weights"] != other.digests()["weights"]

    @pytest.mark.parametrize("stop", [1, 3, 4, 6])
    def test_c76_the_job_holds_all_of_its_state(self, stop: int):
        """Model, optimizer, schedule, loader and torch's generator, carried over by hand: before, at and after the milestone."""
        straight = Job(TINY)
        expected = [straight.train_one() for _ in range(TINY.steps)]
        first = Job(TINY)
        results = [first.train_one() for _ in range(stop)]
        parts = ("model", "optimizer", "scheduler", "loader")
        saved = io.BytesIO()
        torch.save(({part: getattr(first, part).state_dict() for part in parts}, torch.get_rng_state()), saved)
        second = Job(replace(TINY, seed=77))
        saved.seek(0)
        states, generator = torch.load(saved, weights_only=False)
        for part in parts:
            getattr(second, part).load_state_dict(states[part])
        torch.set_rng_state(generator)
        results += [second.train_one() for _ in range(TINY.steps - stop)]
        assert results == expected
        assert second.digests() == straight.digests()

    def test_warm_up_and_cosine_are_seen_in_the_rates(self):
        job = Job(TINY)
        rates = [job.train_one().learning_rate for _ in range(TINY.steps)]
        assert rates[0] == pytest.approx(0.05 * TINY.learning_rate)
        assert max(rates) == rates[TINY.warmup_steps] == pytest.approx(TINY.learning_rate)
        assert rates[TINY.warmup_steps :] == sorted(rates[TINY.warmup_steps :], reverse=True)

    def test_it_learns(self):
        job = Job(replace(TINY, steps=60))
        losses = [job.train_one().loss for _ in range(60)]
        assert sum(losses[-10:]) / 10 < sum(losses[:10]) / 10 - 0.5


class TestDigest:
    def test_any_bit_name_dtype_or_shape_changes_it(self):
        tensor = torch.tensor([1.0, 2.0, -0.0])
        flipped = tensor.clone()
        flipped.view(torch.int32)[1] ^= 1
        variants = [
            {"a": tensor},
            {"b": tensor},
            {"a": flipped},
            {"a": torch.tensor([1.0, 2.0, 0.0])},
            {"a": tensor.view(3, 1)},
            {"a": tensor.view(torch.int32)},
            {"a": tensor, "b": tensor},
        ]
        assert len({tensors_digest(variant) for variant in variants}) == len(variants)

    def test_layout_in_memory_does_not(self):
        tensor = torch.arange(6.0).view(2, 3)
        assert tensors_digest({"a": tensor}) == tensors_digest({"a": tensor.t().contiguous().t()})


class TestEvents:
    def test_json_carries_floats_by_bits(self):
        stream = io.StringIO()
        EventWriter(as_json=True, stream=stream).write("step", step=3, loss_bits=(0.1).hex(), samples=[4, 2])
        event = json.loads(stream.getvalue())
        assert event == {"event": "step", "step": 3, "loss_bits": "0x1.999999999999ap-4", "samples": [4, 2]}

    def test_people_get_one_readable_line(self):
        stream = io.StringIO()
        EventWriter(as_json=False, stream=stream).write("step", step=3, loss=1.23456, loss_bits="0x1p0", samples=[4, 2])
        assert stream.getvalue() == "step     step 3  loss 1.235\n"
