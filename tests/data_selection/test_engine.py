"""The engine against slow, obvious references: whole logits, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.data_selection.base import Measured, Unscored
from finetune.data_selection.engine import rater as rater_module
from finetune.data_selection.engine.batches import plan_batches
from finetune.data_selection.engine.failures import Isolated, UnscorableError
from finetune.data_selection.engine.log import ScoreLog
from finetune.data_selection.engine.processes import Processes
from finetune.data_selection.engine.rater import Rater, TargetRow
from finetune.data_selection.engine.run import collect, measure_pool, plan_work
from finetune.data_selection.engine.trees import TokenTree, grow_tree
from finetune.data_selection.pool import Example
from finetune.data_selection.scorers.loss import AnswerLoss
from support.pools import examples
from support.tiny import tiny_gemma2, tiny_gpt2, tiny_llama, tiny_phi3, tiny_qwen, tiny_tokenizer, token_batch

MODELS = {"llama": tiny_llama, "gpt2": tiny_gpt2, "qwen": tiny_qwen, "phi3": tiny_phi3, "gemma2": tiny_gemma2}
ROWS = [list(range(3, 3 + length)) for length in (5, 9, 1, 7, 30)]


def rater_of(name: str = "llama") -> Rater:
    return Rater(MODELS[name](), tiny_tokenizer(), name)


def reference_loss(model: Any, row: TargetRow) -> tuple[float, int]:
    """All logits of one row, in float64."""
    with torch.no_grad():
        log_p = model(input_ids=torch.tensor([row.input_ids])).logits[0].double().log_softmax(-1)
    picked = [-float(log_p[place - 1, label]) for place, label in enumerate(row.labels) if place and label != -100]
    return sum(picked), len(picked)


class TestBatches:
    def test_longest_first_and_no_more_tokens_than_allowed(self) -> None:
        lengths = [3, 50, 7, 7, 12, 1]
        batches = plan_batches(lengths, 24)
        assert batches == [[1], [4, 2], [3, 0, 5]]  # rows of 12, 7 and 3 tokens: 24 // 12, then 24 // 7
        assert sorted(position for batch in batches for position in batch) == list(range(6))

    def test_no_rows_are_no_batches(self) -> None:
        assert plan_batches([], 10) == []


class TestRater:
    @pytest.mark.parametrize("name", MODELS)
    def test_losses_are_those_of_whole_logits(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rater_module, "CHUNK", 4)
        rater = rater_of(name)
        rows = [TargetRow(ids, [-100 if place % 3 == 1 else token for place, token in enumerate(ids)]) for ids in ROWS]
        losses = rater.losses(rows)
        for row, loss in zip(rows, losses, strict=True):
            total, count = reference_loss(rater.model, row)
            assert loss.tokens == count
            # float32 logits of a batch of another shape
            assert loss.total == pytest.approx(total, abs=1e-4)

    @pytest.mark.parametrize("name", MODELS)
    def test_probabilities_of_some_next_tokens(self, name: str) -> None:
        rater = rater_of(name)
        found = rater.next_tokens(rater.last_hidden(ROWS), [5, 9, 300])
        for row, log_p, likeliest in zip(ROWS, found.log_probabilities, found.likeliest, strict=True):
            with torch.no_grad():
                expected = rater.model(input_ids=torch.tensor([row])).logits[0, -1].float().log_softmax(-1)
            torch.testing.assert_close(log_p, expected[[5, 9, 300]], atol=1e-5, rtol=1e-5)
            assert likeliest == expected.argmax()

    def test_only_read_positions_reach_the_head(self) -> None:
        rater = rater_of()
        rows = []
        rater.model.lm_head.register_forward_pre_hook(lambda module, given: rows.append(given[0].shape[0]))
        row = list(range(3, 203))
        rater.losses([TargetRow(row, [-100] * 190 + row[190:])] * 40)
        assert sum(rows) == 40 * 10
        assert max(rows) <= rater_module.CHUNK

    def test_a_row_beyond_the_context_is_named(self) -> None:
        row = [5] * 513
        with pytest.raises(UnscorableError, match="longer than the model's context"):
            rater_of("gpt2").losses([TargetRow(row, row)])


class TestTrees:
    @pytest.mark.parametrize("name", ["llama", "gpt2", "qwen", "phi3"])
    def test_branches_come_out_as_whole_sequences(self, name: str) -> None:
        rater = rater_of(name)
        tokens = token_batch(1, 60)[0].tolist()
        families = [
            [[*tokens[:20], *tokens[start : start + length]] for start, length in ((30, 3), (33, 9), (40, 1))],
            [[*tokens[5:8], token] for token in (50, 51)],
            [tokens[:1], tokens[3:9]],  # nothing in common
            [tokens],
        ]
        trees = [grow_tree(family) for family in families]
        assert [len(tree.trunk) for tree in trees] == [20, 3, 0, 59]
        found = rater.last_hidden_of_trees(trees)
        alone = torch.cat([rater.last_hidden([row]) for family in families for row in family])
        # the same sums in another order, in float32
        torch.testing.assert_close(found, alone, atol=2e-5, rtol=1e-4)

    def test_a_sequence_that_begins_another_keeps_a_token_of_its_own(self) -> None:
        assert grow_tree([[1, 2, 3], [1, 2]]) == TokenTree([1], [[2, 3], [2]])


class TestLog:
    def test_half_a_line_counts_as_not_written(self, tmp_path: Path) -> None:
        log = ScoreLog(tmp_path)
        log.append(0, 0, {3: {"loss": 0.1 + 0.2}, 1: Unscored("too long", "9 tokens")})
        log.append(0, 1, {0: {"loss": 1.0}})
        whole = (tmp_path / "0.jsonl").read_bytes()
        (tmp_path / "0.jsonl").write_bytes(whole[:-4])
        assert ScoreLog(tmp_path).read() == {(0, 0): {3: {"loss": 0.1 + 0.2}, 1: Unscored("too long", "9 tokens")}}
        ScoreLog(tmp_path).append(0, 1, {0: {"loss": 1.0}})
        assert (tmp_path / "0.jsonl").read_bytes() == whole

    def test_every_process_reads_all_and_writes_its_own(self, tmp_path: Path) -> None:
        ScoreLog(tmp_path, 0).append(0, 0, {0: {"loss": 1.0}})
        ScoreLog(tmp_path, 1).append(0, 1, {1: {"loss": 2.0}})
        assert sorted(ScoreLog(tmp_path, 5).read()) == [(0, 0), (0, 1)]
        assert sorted(file.name for file in tmp_path.iterdir()) == ["0.jsonl", "1.jsonl"]

    def test_a_batch_that_was_tried_again_counts_whoever_tried(self, tmp_path: Path) -> None:
        ScoreLog(tmp_path, 1).append(0, 0, {0: Unscored("the endpoint did not answer"), 1: {"loss": 2.0}})
        ScoreLog(tmp_path, 0).append(0, 0, {0: {"loss": 1.0}, 1: {"loss": 2.0}})
        assert ScoreLog(tmp_path).read() == {(0, 0): {0: {"loss": 1.0}, 1: {"loss": 2.0}}}


class TestFailures:
    def test_one_bad_row_changes_no_other(self) -> None:
        pool = examples(tiny_tokenizer())
        bad = pool[3].key

        def measure(batch: Sequence[Example]) -> list[Measured]:
            if any(example.key == bad for example in batch):
                raise RuntimeError("no such kernel")
            return [{"length": example.tokens} for example in batch]

        isolated = Isolated(measure)
        measured = isolated(pool)
        assert measured[3] == Unscored("measuring failed", "RuntimeError: no such kernel")
        assert [row for place, row in enumerate(measured) if place != 3] == [
            {"length": example.tokens} for place, example in enumerate(pool) if place != 3
        ]

    def test_what_fails_from_the_first_row_on_is_no_fault_of_the_rows(self) -> None:
        def measure(batch: Sequence[Example]) -> list[Measured]:
            raise ZeroDivisionError("a bug")

        with pytest.raises(ZeroDivisionError):
            Isolated(measure)(examples(tiny_tokenizer()))

    def test_too_little_memory_takes_this_batch_and_the_next_apart(self) -> None:
        pool, sizes = examples(tiny_tokenizer())[:4], []

        def measure(batch: Sequence[Example]) -> list[Measured]:
            sizes.append(len(batch))
            if len(batch) > 2:
                raise torch.OutOfMemoryError
            return [{} for _ in batch]

        isolated = Isolated(measure)
        assert [isolated(pool), isolated(pool)] == [[{}] * 4] * 2
        assert sizes == [4, 2, 2, 2, 2]


class TestMeasuring:
    def test_a_row_is_measured_once_over_all_runs_and_scores_the_same(self, tmp_path: Path) -> None:
        pool, calls = examples(tiny_tokenizer()), []

        class Counting(AnswerLoss):
            def measure(self, rater: Rater, batch: Sequence[Example]) -> list[Measured]:
                calls.extend(example.key for example in batch)
                if len(calls) > 3 and interrupted:
                    raise KeyboardInterrupt
                return super().measure(rater, batch)

        def run(folder: Path) -> list[Any]:
            log = ScoreLog(folder)
            work = plan_work(Counting(), pool, log, model="m", batch_tokens=60)
            measure_pool(Counting(), pool, work, log, load=lambda name: rater_of())
            return collect(log, plan_work(Counting(), pool, log, model="m", batch_tokens=60))

        interrupted = False
        whole = run(tmp_path / "whole")
        assert sorted(calls) == sorted(example.key for example in pool)
        interrupted = True
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "again")
        logged = {place for rows in ScoreLog(tmp_path / "again").read().values() for place in rows}
        assert 0 < len(logged) < len(pool)
        interrupted = False
        calls.clear()
        assert run(tmp_path / "again") == whole  # to the last bit
        assert sorted(calls) == sorted(example.key for place, example in enumerate(pool) if place not in logged)

    def test_any_number_of_processes_measures_the_same(self, tmp_path: Path) -> None:
        pool, found = examples(tiny_tokenizer()), []
        for count in (1, 3):
            folder = tmp_path / str(count)
            work = plan_work(AnswerLoss(), pool, ScoreLog(folder), model="m", batch_tokens=60)
            for rank in range(count):
                log, processes = ScoreLog(folder, rank), Processes(rank, count)
                measure_pool(AnswerLoss(), pool, work, log, load=lambda name: rater_of(), processes=processes)
            found.append(collect(ScoreLog(folder), work))
        assert found[0] == found[1]

    def test_a_gap_in_the_log_is_no_score(self, tmp_path: Path) -> None:
        pool = examples(tiny_tokenizer())
        work = plan_work(AnswerLoss(), pool, ScoreLog(tmp_path), model="m", batch_tokens=60)
        with pytest.raises(RuntimeError, match="the log has 0 of"):
            collect(ScoreLog(tmp_path), work)
