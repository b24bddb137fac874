from collections.abc import Callable, Mapping, Sequence

MAX_ADAPTERS: int
COMPILER: str
BUILD_FLAGS: str

class LayerCall:
    def __init__(
        self,
        *,
        tokens: int,
        top_k: int,
        experts: int,
        hidden: int,
        intermediate: int,
        x: int,
        top_k_index: int,
        top_k_weights: int,
        matrices: Sequence[tuple[int, int, int, bool, int, int, int, int, int, int, int, bool, int, int, bool]],
        biases: Sequence[int],
        activation: tuple[int, float, float, float, float],
        adapters: Sequence[tuple[Sequence[int], int, int, float]],
        adapter_ids: int,
        dropout_p: float,
        dropout_seed: int,
        compute: int,
        isa: int,
        threads: int,
        residency_known: bool,
    ) -> None: ...

def forward(call: LayerCall, out: int, saved: int) -> None: ...
def backward(
    call: LayerCall, grad_out: int, saved: int, d_x: int, d_top_k_weights: int, d_factors: Sequence[int]
) -> None: ...
def cpu_features(ask_for_tiles: bool) -> dict[str, bool]: ...
def features_of(
    leaves: Mapping[tuple[int, int], tuple[int, int, int, int]], xcr0: int, ask_for_tiles: Callable[[], bool]
) -> dict[str, bool]: ...
def isa_levels(features: dict[str, bool]) -> list[tuple[str, str]]: ...
