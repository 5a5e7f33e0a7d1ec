"""PyTorch's counterpart of a cold start: DDP over Gloo, PEFT LoRA on a Qwen2.5-VL directory, one AdamW step.

Run by coldstart.py under torchrun. Every rank prints the wall-clock time at which its first optimizer step was done.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen2_5_VLForConditionalGeneration


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(sys.argv[1], dtype=torch.float32)
    model.requires_grad_(False)
    targets = r".*language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"
    model = DistributedDataParallel(get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    config = model.module.base_model.model.config
    grid = [1, 6, 6]  # a 96x96 image becomes 84x84: 36 patches, 9 tokens
    image = [config.image_token_id] * 9
    row = [5, config.vision_start_token_id, *image, config.vision_end_token_id, *range(20, 40)]
    ids = torch.tensor([row] * 2)
    output = model(
        input_ids=ids,
        labels=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=torch.randn(2 * 36, 1176),
        image_grid_thw=torch.tensor([grid] * 2),
        mm_token_type_ids=(ids == config.image_token_id).int(),
        use_cache=False,
    )
    output.loss.backward()
    optimizer.step()
    print(f"FIRST_STEP {os.environ['RANK']} {time.time()}", flush=True)
    dist.destroy_process_group()


main()
