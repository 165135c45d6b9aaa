"""Spectrum: scores against numbers worked by hand and against decompositions, published files, and choices."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import finetune
from finetune.core.errors import ConfigError, TargetError
from finetune.methods.primitives.module_types import module_type, ranked, share_of
from finetune.methods.primitives.signal_to_noise import (
    gram_matrix,
    noise_edge,
    noise_median,
    signal_to_noise,
    singular_values,
)
from finetune.methods.primitives.spectrum_files import published_name, read_scores, write_scores, write_unfrozen
from finetune.methods.primitives.spectrum_scan import cached_scan, scan_weights
from finetune.scan.run import scan_model
from support.tiny import save_tiny_model, tiny_llama, tiny_mixtral

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "spectrum"
needs_published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="../shared/data/spectrum is not there")


@pytest.mark.parametrize(
    ("diagonal", "columns", "expected"),
    [((10, 5, 4, 3, 2, 1), 6, 0.3166667), ((8, 4, 2, 1), 4, 0.1428571), ((8, 4, 2, 1), 16, 0.5)],
)
def test_scores_of_the_spec(diagonal: tuple[float, ...], columns: int, expected: float) -> None:
    matrix = torch.zeros(len(diagonal), columns)
    matrix.diagonal().copy_(torch.tensor(diagonal))
    for oriented in (matrix, matrix.t(), matrix[torch.randperm(len(diagonal))]):
        score = signal_to_noise(singular_values(oriented), *oriented.shape)
        assert math.isclose(score, expected, rel_tol=1e-6)
    assert math.isclose(signal_to_noise(singular_values(3 * matrix), *matrix.shape) * 3, expected, rel_tol=1e-5)


def test_the_published_rule_takes_noise_for_signal_and_the_median_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    square = 0.02 * torch.randn(1024, 1024, generator=generator)
    values = singular_values(square)
    share = float((values > noise_edge(values, 1024, 1024, "spectrum")).double().mean())
    assert 0.230 <= share <= 0.246
    assert 0.78 <= signal_to_noise(values, 1024, 1024) * float(values[-1]) <= 0.82
    wide = singular_values(0.02 * torch.randn(512, 2048, generator=generator))
    assert signal_to_noise(wide, 512, 2048) == math.inf
    for found, shape in ((values, (1024, 1024)), (wide, (512, 2048))):
        assert not bool((found > 1.02 * noise_edge(found, *shape, "median")).any())


@pytest.mark.parametrize(
    ("beta", "median"),
    [(1, 0.8079), (0.75, 0.8619), (0.5, 0.9113), (0.375, 0.9346), (1 / 3, 0.9422), (0.25, 0.9571), (0.1, 0.9831)],
)
def test_medians_of_noise_are_those_of_the_spec(beta: float, median: float) -> None:
    assert abs(noise_median(beta) - median) < 5e-4


@pytest.mark.parametrize("condition", [10.0, 1e6])
def test_gram_matrices_agree_with_decompositions(condition: float) -> None:
    """Float32 loses the smallest values of an ill-conditioned matrix; the ranking has to stay."""
    generator = torch.Generator().manual_seed(1)
    matrices, exact = {}, {}
    for number in range(6):
        left, right = (torch.linalg.qr(torch.randn(n, 64, generator=generator).double())[0] for n in (64, 96))
        spread = torch.logspace(0, -math.log10(condition), 64).double() * (1 + torch.rand(64, generator=generator))
        matrix = left @ spread.diag() @ right.t()
        name = f"layers.{number}.up"
        matrices[name] = matrix.float()
        exact[name] = signal_to_noise(torch.linalg.svdvals(matrix).flip(0), 64, 96)
        precise = signal_to_noise(singular_values(matrix, precise=True), 64, 96)
        assert math.isclose(precise, exact[name], rel_tol=1e-6)
    scores = scan_weights({name: (lambda matrix=matrix: matrix) for name, matrix in matrices.items()})
    assert ranked(scores) == ranked(exact)
    if condition == 10:
        assert all(math.isclose(scores[name], exact[name], rel_tol=1e-4) for name in exact)


def test_nearly_equal_scores_are_formed_again_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.methods.primitives import spectrum_scan

    asked: list[bool] = []

    def watched(matrix: torch.Tensor, *, precise: bool = False) -> torch.Tensor:
        asked.append(precise)
        return gram_matrix(matrix, precise=precise)

    monkeypatch.setattr(spectrum_scan, "gram_matrix", watched)
    first = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))
    weights = {"layers.0.up": first, "layers.1.up": first * (1 + 1e-5), "layers.2.up": first * 3}
    scores = scan_weights({name: (lambda weight=weight: weight) for name, weight in weights.items()})
    assert asked == [False, False, False, True, True]
    assert ranked(scores) == {"up": ["layers.0.up", "layers.1.up", "layers.2.up"]}


def test_types_are_told_apart_and_shares_are_exact() -> None:
    assert module_type("model.layers.5.self_attn.q_proj.weight") == "self_attn.q_proj"
    assert module_type("model.layers.5.mlp.gate") != module_type("model.layers.5.mlp.gate_proj")
    assert module_type("model.layers.1.moe.experts.3.w1") == "moe.experts.3.w1"
    assert module_type("encoder.block.3.fc") != module_type("decoder.block.3.fc")
    assert module_type("lm_head") == "lm_head"
    assert share_of(100, 29) == 29  # int(100 * 0.29) is 28
    assert (share_of(1, 99), share_of(1, 100), share_of(1, 1, "ceil")) == (0, 1, 1)
    assert ranked({"a.0.x": math.inf, "a.1.x": 1.0, "a.2.x": math.inf}) == {"x": ["a.0.x", "a.2.x", "a.1.x"]}


@needs_published
def test_the_published_selection_is_reproduced_line_for_line(tmp_path: Path) -> None:
    stem = "snr_results_meta-llama-Meta-Llama-3.1-8B-Instruct"
    ranking = ranked(read_scores(PUBLISHED / f"{stem}.json"))
    write_unfrozen(tmp_path / "list.yaml", {kind: names[: share_of(len(names), 50)] for kind, names in ranking.items()})
    golden = PUBLISHED / f"{stem}_unfrozenparameters_50percent.yaml"
    assert (tmp_path / "list.yaml").read_text().splitlines() == golden.read_text().splitlines()
    assert published_name("meta-llama/Meta-Llama-3.1-8B-Instruct") == f"{stem}.json"


@needs_published
def test_the_flat_schema_is_read_and_written(tmp_path: Path) -> None:
    scores = read_scores(PUBLISHED / "snr_results_microsoft-Phi-3-mini-4k-instruct.json")
    assert [share_of(len(names), 25) for names in ranked(scores).values()] == [8, 8, 8, 8]
    source = PUBLISHED / "snr_results_HuggingFaceTB-SmolLM-135M.json"
    write_scores(tmp_path / "again.json", read_scores(source))
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(source.read_text())


def test_a_quarter_of_each_type_trains_by_its_own_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    model = tiny_llama(layers=4)
    exact = {
        name.removesuffix(".weight"): signal_to_noise(torch.linalg.svdvals(p.double()).flip(0).detach(), *p.shape)
        for name, p in model.named_parameters()
        if ".layers." in name and p.ndim == 2
    }
    expected = {f"{names[0]}.weight" for names in ranked(exact).values()}
    method = finetune.method("spectrum", top_percent=25)
    method.attach(model)
    assert set(method.trained_parameters()) == expected
    assert len(list((tmp_path / "scans").iterdir())) == 1
    scored = {name: model.get_parameter(f"{name}.weight").detach for name in exact}
    monkeypatch.setattr("finetune.methods.primitives.spectrum_scan.scan_weights", lambda *_, **__: pytest.fail("again"))
    torch.testing.assert_close(cached_scan(scored), exact, atol=0, rtol=1e-3)


def test_controls_embeddings_and_fused_experts() -> None:
    bottom, top = (finetune.method("spectrum", top_percent=50, order=order) for order in ("bottom", "top"))
    for method in (bottom, top):
        method.attach(tiny_llama())
    assert not set(bottom.trained_parameters()) & set(top.trained_parameters())
    method = finetune.method("spectrum", top_percent=50, train_embeddings=True, train_norms=True, exclude=["**.q_proj"])
    method.attach(tiny_llama())
    names = set(method.trained_parameters())
    assert {"model.embed_tokens.weight", "model.norm.weight"} < names
    assert not any("q_proj" in name for name in names)
    experts = finetune.method("spectrum", top_percent=50)
    experts.attach(tiny_mixtral())
    assert any(name.endswith("experts.gate_up_proj") for name in experts.trained_parameters())


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="top_percent"):
        finetune.method("spectrum", top_percent=0)
    with pytest.raises(TargetError, match="matches no parameter"):
        finetune.method("spectrum", exclude=["**.q_porj"]).attach(tiny_llama())
    with pytest.raises(TargetError, match="are none"):
        finetune.method("spectrum", top_percent=25).attach(tiny_llama())
    write_scores(tmp_path / "other.json", {"model.layers.40.mlp.up_proj": 1.0})
    with pytest.raises(ConfigError, match="another model"):
        finetune.method("spectrum", scores=str(tmp_path / "other.json")).attach(tiny_llama())
    write_scores(tmp_path / "few.json", {"model.layers.0.mlp.up_proj": 1.0})
    with pytest.raises(ConfigError, match="have no score"):
        finetune.method("spectrum", scores=str(tmp_path / "few.json")).attach(tiny_llama())
    (tmp_path / "text.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="no file of signal"):
        read_scores(tmp_path / "text.json")
    broken = tiny_llama()
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight.zero_()
    with pytest.raises(TargetError, match=r"layers\.1\.mlp\.up_proj"):
        finetune.method("spectrum").attach(broken)


@pytest.mark.parametrize("build", [tiny_llama, tiny_mixtral])
def test_a_scan_of_files_says_what_the_method_will_train(build: object, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    model = build()  # type: ignore[operator]
    model.save_pretrained(tmp_path / "model")
    found = scan_model(str(tmp_path / "model"), tmp_path / "scans", top_percent=50)
    assert all(file.stat().st_size > 0 for file in found.files)
    method = finetune.method("spectrum", top_percent=50, scores=str(found.files[0]))
    method.attach(build())  # type: ignore[operator]
    own = finetune.method("spectrum", top_percent=50)
    own.attach(build())  # type: ignore[operator]
    assert set(method.trained_parameters()) == set(own.trained_parameters())


def test_damaged_weight_files_are_named(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConfigError, match="missing or damaged") as caught:
        scan_model(str(folder), tmp_path / "scans")
    assert "model.safetensors" in str(caught.value)
    weights.unlink()
    with pytest.raises(ConfigError, match="no safetensors files"):
        scan_model(str(folder), tmp_path / "scans")
    assert not (tmp_path / "scans").exists()
