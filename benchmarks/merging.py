"""What merging adapters costs in precision, beside what float32 costs anyway: `python benchmarks/merging.py --model FOLDER [--rank 8]`.

Adapters made up in several sizes beside a published model's weights. On a few texts the largest difference of logits, of each way to
compute them in float32 from the exact ones (float64 all the way): adapters beside the weights, on one stage and on two; merged into
them, as export writes it; and the merged weights, which are float32, computed in float64: what merging itself does. Size 0: the
published model. Expected beforehand: two stages as one, merging far below what float32 does to the model.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from swarm import header

from dilocox_peer.data.tokenizer import JsonTokenizer
from dilocox_peer.model.adapters import DOWN, UP, Lora, merged
from dilocox_peer.model.architecture import LayerRange
from dilocox_peer.model.published import Design, PublishedStage, design_from, frozen_design_layout
from dilocox_peer.model.weights import open_folder

SIZES = (0.0, 1e-3, 3e-3, 1e-2)  # standard deviation of B
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROWS, TOKENS = 4, 64

Tensors = dict[str, torch.Tensor]


def made_up(base: Tensors, rank: int, size: float) -> Tensors:
    generator, found = torch.Generator().manual_seed(1), {}
    for name, weight in base.items():
        path = name.removesuffix(".weight")
        if path.rpartition(".")[2] in TARGETS:
            outputs, inputs = weight.shape
            found[path + DOWN] = (torch.rand(rank, inputs, generator=generator) * 2 - 1) * inputs**-0.5
            found[path + UP] = torch.randn(outputs, rank, generator=generator) * size
    return found


def stage_of(design: Design, layers: LayerRange, base: Tensors, adapters: Tensors) -> PublishedStage:
    embedding = base[design.family.input_embedding]  # of several stages the head is another matrix, that begins as it
    frozen = {each.name: base.get(each.name, embedding) for each in frozen_design_layout(design, layers).tensors}
    stage = PublishedStage(design, layers, frozen=frozen)
    stage.flat_N.copy_(torch.cat([adapters[spec.name].flatten() for spec in stage.layout.tensors]))
    return stage


@torch.no_grad()
def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__).with_name("optparse.py"))
    arguments = parser.parse_args()
    print(header())
    torch.set_num_threads(1)
    folder, lora = open_folder(arguments.model), Lora(arguments.rank, 2.0 * arguments.rank, TARGETS, "float32")
    ids = JsonTokenizer(folder.read_small("tokenizer.json")).encode([arguments.text.read_bytes()])[0]
    rows = torch.from_numpy(ids[: ROWS * TOKENS].astype("int64")).view(ROWS, 1, TOKENS)
    exact_model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float64)
    float_model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    base = {name: each.detach().clone() for name, each in float_model.named_parameters()}

    def logits(model: torch.nn.Module, tensors: Tensors) -> torch.Tensor:
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
        return torch.cat([model(row).logits for row in rows]).double()

    designs = [
        replace(design_from(folder.config_json, num_stages=count, context=TOKENS), lora=lora) for count in (1, 2)
    ]
    layers = designs[0].config.num_hidden_layers
    for size in SIZES:
        adapters = made_up(base, arguments.rank, size)
        exact_weights = {
            name: each.double() + lora.scale * (adapters[path + UP].double() @ adapters[path + DOWN].double())
            if (path := name.removesuffix(".weight")) + DOWN in adapters
            else each.double()
            for name, each in base.items()
        }
        exported = merged(base, adapters, lora)
        exact = logits(exact_model, exact_weights)
        whole = stage_of(designs[0], LayerRange(0, layers - 1, True, True), base, adapters)
        first = stage_of(designs[1], LayerRange(0, layers // 2 - 1, True, False), base, adapters)
        last = stage_of(designs[1], LayerRange(layers // 2, layers - 1, False, True), base, adapters)
        beside = torch.cat([whole.forward(row) for row in rows]).double()
        parted = torch.cat([last.forward(first.forward(row)) for row in rows]).double()
        merged_logits = logits(float_model, exported)

        def apart(one: torch.Tensor, other: torch.Tensor) -> str:
            return f"{float((one - other).abs().max()):.1e}"

        print(
            f"adapters of {size:g}, logits up to {float(exact.abs().max()):.1f}: from exact beside {apart(beside, exact)}, merged "
            f"{apart(merged_logits, exact)}, merged in float64 {apart(logits(exact_model, exported), exact)}; beside from merged "
            f"{apart(beside, merged_logits)}; two stages from one {apart(parted, beside)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
