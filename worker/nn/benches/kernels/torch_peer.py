"""The counterpart of the `kernels` bench in PyTorch: reads `NAME<TAB>SECONDS` lines, answers with the times of one turn in ms.

usage: torch_peer.py THREADS wall|cpu      (started by the bench; needs torch, transformers and peft)
"""
import os, sys, time

THREADS = int(sys.argv[1])
clock = time.process_time if sys.argv[2] == "cpu" else time.perf_counter
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(THREADS)
import torch, torch.nn.functional as F

torch.set_num_threads(THREADS)
torch.manual_seed(0)
B, S, D, H, KV, K, I, R = 2, 192, 768, 12, 4, 64, 2048, 16
N = B * S
rnd = lambda *shape: torch.randn(*shape) * 0.05
leaf = lambda x: x.detach().requires_grad_()
cases = {}


def forward(name, f):
    def run():
        with torch.no_grad(): f()
    cases[name] = run


def both(name, f, *inputs):
    def run(): f(*[leaf(x) for x in inputs]).sum().backward()
    cases[name] = run


def pair(name, f, *inputs):
    forward(name, lambda: f(*inputs)); both(name + " both", f, *inputs)


def rowwise():
    x, g = rnd(N, D), rnd(D)
    # As transformers writes it.
    pair("rms_norm", lambda x: g * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), x)
    gate, up = rnd(N, I), rnd(N, I)
    pair("swiglu", lambda gate, up: F.silu(gate) * up, gate, up)
    both("gelu_tanh both", lambda x: F.gelu(x, approximate="tanh"), gate)
    q, cos, sin = rnd(B, S, H, K), rnd(B, S, 1, K), rnd(B, S, 1, K)
    half = lambda x: torch.cat((-x[..., K // 2:], x[..., :K // 2]), -1)
    pair("rotary", lambda q: q * cos + half(q) * sin, q)


def linear():
    for n, i, o in ((N, D, D), (N, D, I), (N, I, D), (34, D, 4 * D)):
        w = rnd(o, i)
        pair(f"linear {n}x{i}x{o}", lambda x, w=w: F.linear(x, w), rnd(n, i))
    both("linear 34x768x3072 trained", F.linear, rnd(34, D), rnd(4 * D, D), rnd(4 * D))
    w = rnd(I, D)
    both(f"lora {N}x{D}x{I} both", lambda x, a, b: F.linear(x, w) + F.linear(F.linear(x, a), b) * 1.0, rnd(N, D), rnd(R, D), rnd(I, R))


def attention():
    def causal(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(H // KV, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()

    def windows(q, k, v):  # As transformers runs a windowed vision layer: one call a window.
        cut = lambda t: t.transpose(1, 2).split(64, 2)
        return torch.cat([F.scaled_dot_product_attention(*w) for w in zip(cut(q), cut(k), cut(v))], 2).transpose(1, 2).contiguous()

    def cross(q, k, v): return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2).contiguous()
    pair("attention causal", causal, rnd(B, S, H, K), rnd(B, S, KV, K), rnd(B, S, KV, K))
    pair("attention windows", windows, *(rnd(1, 1024, 6, 64) for _ in range(3)))
    pair("attention cross", cross, rnd(B, 17, 12, 64), rnd(B, S, 12, 64), rnd(B, S, 12, 64))


def layers():
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    def model(layers):
        config = Qwen2_5_VLConfig(
            text_config=dict(vocab_size=64, hidden_size=D, intermediate_size=I, num_hidden_layers=layers, num_attention_heads=H, num_key_value_heads=KV,
                             rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[8, 12, 12])),
            vision_config=dict(depth=1, hidden_size=64, intermediate_size=64, num_heads=2, out_hidden_size=D, fullatt_block_indexes=[0]),
            image_token_id=60, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63)
        config._attn_implementation = "sdpa"
        model = Qwen2_5_VLForConditionalGeneration(config).requires_grad_(False)
        names = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
        model = get_peft_model(model, LoraConfig(r=R, lora_alpha=R, target_modules=rf".*language_model.*\.({names})"))
        return model, model.base_model.model.model.language_model
    mask = torch.ones(B, S, dtype=torch.long)
    position = torch.arange(S).expand(3, B, S)
    x = rnd(B, S, D)
    for name, count in (("layer", 1), ("text", 12)):
        whole, text = model(count)
        run = lambda x, text=text: text(inputs_embeds=x, attention_mask=mask, position_ids=position, use_cache=False).last_hidden_state
        def step(run=run, whole=whole):
            run(leaf(x)).sum().backward()
            for p in whole.parameters(): p.grad = None
        forward(f"{name} forward", lambda run=run: run(x)); cases[f"{name} both"] = step
    whole, text = model(12)
    whole.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False)); whole.train()
    def step():
        text(inputs_embeds=leaf(x), attention_mask=mask, position_ids=position, use_cache=False).last_hidden_state.sum().backward()
        for p in whole.parameters(): p.grad = None
    cases["text both, recompute"] = step


rowwise(); linear(); attention(); layers()
print("ready", flush=True)
for line in sys.stdin:
    name, seconds = line.rstrip("\n").split("\t")
    run, times, end = cases[name], [], time.perf_counter() + float(seconds)
    while not times or time.perf_counter() < end:
        start = clock(); run(); times.append((clock() - start) * 1e3)
    print(*times, flush=True)
