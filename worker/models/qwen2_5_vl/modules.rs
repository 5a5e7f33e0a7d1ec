//! The model's modules by the paths that Transformers 5 and PEFT give them, known from sizes alone.

use coxswain_nn::{
    dtypes::{FrozenDtype, WeightsDtype},
    kernels::quantized::QuantizedMatrix,
    lora::{Module, ModuleKind},
    params::chunk,
    sharded::Cut,
};

use super::{
    blocks::{InMemory, TABLE, TablePlace},
    config::QwenConfig,
};

/// All named modules of `Qwen2_5_VLForConditionalGeneration`, in its order.
pub fn modules(config: &QwenConfig) -> Vec<Module> {
    let mut list = List(Vec::new());
    list.other("model");
    vision(config, &mut list);
    text(config, &mut list);
    list.push("lm_head", linear(config.text.hidden_size, config.text.vocab_size, true));
    list.0
}

/// A frozen tensor that training loads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrozenTensor {
    /// As in the checkpoint.
    pub name: String,
    /// How many numbers it has.
    pub elements: usize,
    /// Matrices are kept in `model.weights_dtype`; biases and gains are always float32.
    pub is_matrix: bool,
    /// Outputs and inputs of a linear layer that is quantized where that is asked for.
    pub packs: Option<[usize; 2]>,
}

/// Whether the weight of this linear layer is quantized where that is asked for: the language model's, not
/// the vision tower's and not a head. bitsandbytes leaves out what a user names; these are what is commonly
/// named.
pub fn packs(module: &str) -> bool {
    !of_vision(module) && module != "lm_head"
}

impl FrozenTensor {
    /// Whether it is the vision tower's; else it is the language model's.
    pub fn of_vision(&self) -> bool {
        of_vision(&self.name)
    }

    /// The repeated block of its tower that it is part of; none for what a tower has besides them.
    pub fn block(&self) -> Option<usize> {
        let stacks = ["model.visual.blocks.", "model.language_model.layers."];
        let rest = stacks.iter().find_map(|stack| self.name.strip_prefix(stack))?;
        rest.split('.').next()?.parse().ok()
    }

    /// Bytes of its elements where matrices are kept as `dtype`.
    pub fn kept_bytes(&self, dtype: FrozenDtype) -> u64 {
        self.packed_bytes(dtype).unwrap_or_else(|| self.dense_dtype(dtype).bytes() * self.elements as u64)
    }

    /// The same on a GPU, where few bits lie in words.
    pub fn device_bytes(&self, dtype: FrozenDtype) -> u64 {
        match dtype.packing().zip(self.packs) {
            Some((packing, shape)) => QuantizedMatrix::device_bytes(packing, shape),
            None => self.kept_bytes(dtype),
        }
    }

    /// Bytes in host memory, if it is quantized then.
    pub fn packed_bytes(&self, dtype: FrozenDtype) -> Option<u64> {
        Some(QuantizedMatrix::bytes(dtype.packing()?, self.packs?))
    }

    /// Its type, unless it is quantized then.
    pub fn dense_dtype(&self, dtype: FrozenDtype) -> WeightsDtype {
        if self.is_matrix { dtype.dense() } else { WeightsDtype::Float32 }
    }
}

/// Bytes of frozen weights, as far as it matters which of them are in memory when.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrozenBytes {
    /// Of what is not part of a repeated block.
    pub outside: u64,
    /// Of that the table of token embeddings.
    pub table: u64,
    /// Of each repeated block: language model, vision tower.
    pub towers: [Vec<u64>; 2],
}

/// One of the two stacks of repeated blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TowerKind {
    /// Decoder layers.
    Text,
    /// Vision blocks.
    Vision,
}

impl FrozenBytes {
    /// Adds up `bytes` of all frozen tensors.
    pub fn of(tensors: &[FrozenTensor], bytes: impl Fn(&FrozenTensor) -> u64) -> Self {
        let mut found = Self::default();
        for tensor in tensors {
            let bytes = bytes(tensor);
            let Some(block) = tensor.block() else {
                found.outside += bytes;
                found.table += if tensor.name == TABLE { bytes } else { 0 };
                continue;
            };
            let tower = &mut found.towers[usize::from(tensor.of_vision())];
            if tower.len() <= block {
                tower.resize(block + 1, 0);
            }
            tower[block] += bytes;
        }
        found
    }

    /// Of the two neighbours among a tower's blocks that are largest together: what is in memory at once of
    /// blocks that are streamed while it runs.
    pub fn two_blocks_of(&self, tower: TowerKind) -> u64 {
        let blocks = &self.towers[tower as usize];
        let pairs = blocks.windows(2).map(|pair| pair[0] + pair[1]);
        pairs.chain(blocks.first().copied()).max().unwrap_or(0)
    }

    /// The same of the tower that takes more.
    pub fn two_blocks(&self) -> u64 {
        self.two_blocks_of(TowerKind::Text).max(self.two_blocks_of(TowerKind::Vision))
    }

    /// Those in memory at once.
    pub fn in_memory(&self, blocks: InMemory) -> u64 {
        let all = self.towers.iter().flatten();
        let held = match blocks {
            InMemory::All => all.sum(),
            InMemory::TwoBlocks => 0,
            InMemory::Part(Cut { rank, world }) => {
                all.map(|&block| chunk(block as usize, world, rank).len() as u64).sum()
            }
        };
        self.outside + held + if blocks.fetches() { self.two_blocks() } else { 0 }
    }
}

/// The frozen tensors that training loads, in the order of modules. An LM head of its own is not among them.
pub fn frozen_tensors(config: &QwenConfig) -> Vec<FrozenTensor> {
    let (vision, text) = (&config.vision, &config.text);
    let mut tensors = Vec::new();
    let mut add = |name: String, elements, is_matrix, packs| {
        tensors.push(FrozenTensor { name, elements, is_matrix, packs })
    };
    for Module { name, kind, .. } in modules(config) {
        match kind {
            ModuleKind::Linear { head: true, .. } => {}
            ModuleKind::Linear { inputs, outputs, .. } => {
                let packs = packs(&name).then_some([outputs, inputs]);
                add(format!("{name}.weight"), inputs * outputs, true, packs);
                if has_bias(&name) {
                    add(format!("{name}.bias"), outputs, false, None);
                }
            }
            ModuleKind::Convolution => {
                add(format!("{name}.weight"), vision.hidden_size * vision.patch_values(), true, None);
            }
            ModuleKind::Embedding { .. } => {
                add(format!("{name}.weight"), text.vocab_size * text.hidden_size, true, None);
            }
            ModuleKind::Norm => {
                let width = if of_vision(&name) { vision.hidden_size } else { text.hidden_size };
                add(format!("{name}.weight"), width, false, None);
            }
            ModuleKind::Other => {}
        }
    }
    tensors
}

/// The LM head's weight, where it is not the embedding table: for tasks that ask for logits.
pub fn head_tensor(config: &QwenConfig) -> Option<FrozenTensor> {
    let elements = config.text.hidden_size * config.text.vocab_size;
    let head = FrozenTensor { name: "lm_head.weight".into(), elements, is_matrix: true, packs: None };
    (!config.tie_word_embeddings).then_some(head)
}

/// A frozen part of the model, as the table at the start of a run shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrozenPart {
    /// `vision`, `language`, `streamed` or `sharded`, or `embedding` if that is in host memory.
    pub name: &'static str,
    /// Tensors.
    pub tensors: usize,
    /// Elements.
    pub elements: usize,
    /// Bytes in memory; of what is streamed as many as are there at once.
    pub bytes: u64,
    /// How its linear layers are kept, as run files spell it.
    pub dtype: &'static str,
}

/// Frozen weights of the vision tower, of the language model, and of blocks of either that are not all held,
/// and of a table that is somewhere else, if there are any.
pub fn frozen_parts(
    tensors: &[FrozenTensor],
    dtype: FrozenDtype,
    blocks: InMemory,
    table: TablePlace,
) -> Vec<FrozenPart> {
    let dense = dtype.dense().name();
    let apart = if blocks == InMemory::TwoBlocks { "streamed" } else { "sharded" };
    let mut parts = [("vision", dense), ("language", dtype.name()), (apart, dense), ("embedding", dense)]
        .map(|(name, dtype)| FrozenPart { name, dtype, ..FrozenPart::default() });
    for tensor in tensors {
        let part = match tensor.block() {
            Some(_) if blocks != InMemory::All => 2,
            _ if table == TablePlace::Host && tensor.name == TABLE => 3,
            _ if tensor.of_vision() => 0,
            _ => 1,
        };
        parts[part].tensors += 1;
        parts[part].elements += tensor.elements;
        parts[part].bytes += tensor.kept_bytes(dtype);
    }
    let bytes = FrozenBytes::of(tensors, |tensor| tensor.kept_bytes(dtype));
    parts[2].bytes = bytes.in_memory(blocks) - bytes.outside;
    let shown = |(place, part): &(usize, FrozenPart)| *place < 2 || part.tensors > 0;
    parts.into_iter().enumerate().filter(shown).map(|(_, part)| part).collect()
}

fn of_vision(name: &str) -> bool {
    name.starts_with("model.visual")
}

/// Whether a linear has a bias: all of the vision tower's, and query, key and value of the language model.
pub fn has_bias(module: &str) -> bool {
    of_vision(module) || ["q_proj", "k_proj", "v_proj"].iter().any(|end| module.ends_with(end))
}

fn vision(config: &QwenConfig, list: &mut List) {
    let vision = &config.vision;
    let (d, f) = (vision.hidden_size, vision.intermediate_size);
    list.other("model.visual");
    list.other("model.visual.patch_embed");
    list.push("model.visual.patch_embed.proj", ModuleKind::Convolution);
    list.other("model.visual.rotary_pos_emb");
    list.other("model.visual.blocks");
    for block in 0..vision.depth {
        let at = format!("model.visual.blocks.{block}");
        list.other(&at);
        list.norm(&format!("{at}.norm1"));
        list.norm(&format!("{at}.norm2"));
        list.other(&format!("{at}.attn"));
        list.linear(&format!("{at}.attn.qkv"), d, 3 * d);
        list.linear(&format!("{at}.attn.proj"), d, d);
        list.mlp(&at, d, f);
    }
    let merged = d * vision.merge_unit();
    list.other("model.visual.merger");
    list.norm("model.visual.merger.ln_q");
    list.other("model.visual.merger.mlp");
    list.linear("model.visual.merger.mlp.0", merged, merged);
    list.other("model.visual.merger.mlp.1");
    list.linear("model.visual.merger.mlp.2", merged, vision.out_hidden_size);
}

fn text(config: &QwenConfig, list: &mut List) {
    let text = &config.text;
    let (d, kv) = (text.hidden_size, text.num_kv_heads * text.head_dim);
    list.other("model.language_model");
    let tied = config.tie_word_embeddings;
    list.push("model.language_model.embed_tokens", ModuleKind::Embedding { tied });
    list.other("model.language_model.layers");
    for layer in 0..text.num_layers {
        let at = format!("model.language_model.layers.{layer}");
        list.other(&at);
        list.other(&format!("{at}.self_attn"));
        list.linear(&format!("{at}.self_attn.q_proj"), d, d);
        list.linear(&format!("{at}.self_attn.k_proj"), d, kv);
        list.linear(&format!("{at}.self_attn.v_proj"), d, kv);
        list.linear(&format!("{at}.self_attn.o_proj"), d, d);
        list.mlp(&at, d, text.intermediate_size);
        list.norm(&format!("{at}.input_layernorm"));
        list.norm(&format!("{at}.post_attention_layernorm"));
    }
    list.norm("model.language_model.norm");
    list.other("model.language_model.rotary_emb");
}

fn linear(inputs: usize, outputs: usize, head: bool) -> ModuleKind {
    ModuleKind::Linear { inputs, outputs, head }
}

/// The path that `name` had before Transformers 4.52.
fn old_name(name: &str) -> String {
    match name.strip_prefix("model.") {
        Some(rest) if rest.starts_with("visual") => rest.into(),
        Some(rest) => {
            rest.strip_prefix("language_model.").map_or("model".into(), |rest| format!("model.{rest}"))
        }
        None => name.into(),
    }
}

struct List(Vec<Module>);

impl List {
    fn push(&mut self, name: &str, kind: ModuleKind) {
        self.0.push(Module { name: name.into(), old_name: old_name(name), kind });
    }

    fn other(&mut self, name: &str) {
        self.push(name, ModuleKind::Other);
    }

    fn norm(&mut self, name: &str) {
        self.push(name, ModuleKind::Norm);
    }

    fn linear(&mut self, name: &str, inputs: usize, outputs: usize) {
        self.push(name, linear(inputs, outputs, false));
    }

    fn mlp(&mut self, at: &str, width: usize, inner: usize) {
        self.other(&format!("{at}.mlp"));
        self.linear(&format!("{at}.mlp.gate_proj"), width, inner);
        self.linear(&format!("{at}.mlp.up_proj"), width, inner);
        self.linear(&format!("{at}.mlp.down_proj"), inner, width);
        self.other(&format!("{at}.mlp.act_fn"));
    }
}
