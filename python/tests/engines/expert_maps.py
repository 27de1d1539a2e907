"""Plug-in of vLLM, for tests: expert parallelism on the CPU. vLLM 0.32.0 gives its CPU kernel the numbers of
all experts and the weights of a rank's own, so the kernel reads behind the weights and the rank dies. Here
tokens of other ranks' experts get an expert of this rank's, and a weight of zero."""

import pathlib
import sys


def install(folder):
    """Has vLLM find the plug-in in processes that have the folder in PYTHONPATH."""
    about = pathlib.Path(folder) / "expert_maps-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: expert_maps\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nexpert_maps = expert_maps:plug_in\n")
    return f"{folder}:{pathlib.Path(__file__).parent}"


def plug_in():
    """Called by vLLM in each of its processes."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    kind = cpu_moe.CPUUnquantizedExperts
    if kind.__dict__.get("maps_experts"):
        return
    apply = kind.apply

    def mapped(self, *arguments, **options):
        options = {**dict(zip(NAMES, arguments, strict=False)), **options}
        places = options["expert_map"]
        if places is not None:
            ids = places.to(options["topk_ids"].device)[options["topk_ids"].long()]
            options["topk_weights"] = options["topk_weights"] * (ids >= 0)
            options["topk_ids"] = ids.clamp(min=0).to(options["topk_ids"].dtype)
        apply(self, **options)

    kind.apply, kind.maps_experts = mapped, True
    print("experts are mapped", file=sys.stderr, flush=True)


#: Arguments of the method, in order.
NAMES = (
    "output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts expert_map a1q_scale "
    "a2_scale workspace13 workspace2 expert_tokens_meta apply_router_weight_on_input"
).split()
