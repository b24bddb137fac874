"""What a training run leaves besides the adapter: the summary, on screen and as ``summary.json``, and ``loss.png``."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict, dataclass
from pathlib import Path

from ktft.train.score import Score


@dataclass(frozen=True)
class Summary:
    """One run in numbers. Seconds are wall clock; ``peak_rss_gb`` (1e9 bytes) counts mapped pages of the checkpoint
    too."""

    output_dir: str
    base_model: str
    interrupted: bool
    steps: int
    first_step: int
    epochs: float
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    tokens: int
    tokens_per_second: float
    train_seconds: float
    total_seconds: float
    trainable_parameters: int
    all_parameters: int
    peak_rss_gb: float
    exact_match_before: Score | None = None
    exact_match_after: Score | None = None

    def __str__(self) -> str:
        rows = [
            ("steps", f"{self.steps}" + (f" (from {self.first_step})" if self.first_step else "")),
            ("epochs", f"{self.epochs:.2f}"),
            ("trainable", f"{self.trainable_parameters:,} of {self.all_parameters:,} parameters"),
            ("time", f"{_duration(self.total_seconds)}, {_duration(self.train_seconds)} of it in training steps"),
            ("speed", f"{self.tokens_per_second:.0f} tokens/s, {self.tokens:,} tokens"),
            ("peak memory", f"{self.peak_rss_gb:.2f} GB resident, mapped weights included"),
        ]
        if self.first_loss is not None and self.last_loss is not None:
            rows.append(("loss", f"{self.first_loss:.4f} at first, {self.last_loss:.4f} at last"))
        if self.eval_loss is not None:
            rows.append(("held-out loss", f"{self.eval_loss:.4f}"))
        if self.exact_match_before is not None:
            rows.append(("exact before", str(self.exact_match_before)))
        if self.exact_match_after is not None:
            rows.append(("exact after", str(self.exact_match_after)))
        rows.append(("adapter", self.output_dir))
        if self.interrupted:
            rows.append(("interrupted", "go on with: overwrite_output_dir=false resume_from_checkpoint=true"))
        else:
            rows.append(("try it", f"ktft chat {self.base_model} --adapter {self.output_dir}"))
        return "\n".join(f"  {name:<14}{value}" for name, value in rows)

    def write(self, path: Path) -> None:
        """As JSON, answers included."""
        path.write_text(json.dumps(asdict(self), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def peak_rss_gb() -> float:
    """The most memory this process has had resident, file mappings included, in 1e9 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def plot_loss(entries: list[dict[str, float]], path: Path) -> None:
    """Training and held-out loss over steps, as a PNG. Nothing is written when there is nothing to draw."""
    training = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
    held_out = [(entry["step"], entry["eval_loss"]) for entry in entries if "eval_loss" in entry]
    if not training:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The object interface: pyplot would pick a backend and keep global state.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*training, strict=True), label="training")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", label="held out")
    axes.set(xlabel="step", ylabel="loss per token", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


__all__ = ["Summary", "peak_rss_gb", "plot_loss"]
