//! The frozen tensors of a model, known from sizes alone: how they are kept, and what of them is in memory
//! when.

use coxswain_nn::{
    dtypes::{FrozenDtype, WeightsDtype},
    kernels::quantized::QuantizedMatrix,
    lora::{Module, ModuleKind},
    params::chunk,
    sharded::Cut,
};

use super::{
    blocks::{InMemory, TablePlace},
    rules::{Place, Rules},
};

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
    /// The part of the model that it belongs to.
    pub place: Place,
}

impl FrozenTensor {
    /// Whether it is the vision tower's; else it is the language model's.
    pub fn of_vision(&self) -> bool {
        matches!(self.place, Place::Vision(_))
    }

    /// The repeated block of its tower that it is part of; none for what a tower has besides them.
    pub fn block(&self) -> Option<usize> {
        match self.place {
            Place::Vision(block) => block,
            Place::Layer(layer) => Some(layer),
            _ => None,
        }
    }

    /// Bytes of its elements where matrices are kept as `dtype`.
    pub fn kept_bytes(&self, dtype: FrozenDtype) -> u64 {
        self.packed_bytes(dtype).unwrap_or_else(|| self.dense_dtype(dtype).bytes() * self.elements as u64)
    }

    /// Bytes of its elements on a GPU, where few bits lie in words.
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

    /// Type, unless it is quantized then.
    pub fn dense_dtype(&self, dtype: FrozenDtype) -> WeightsDtype {
        if self.is_matrix { dtype.dense() } else { WeightsDtype::Float32 }
    }
}

/// Bytes of frozen weights, as far as it matters which of them are in memory when.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrozenBytes {
    /// Bytes of what is not part of a repeated block.
    pub outside: u64,
    /// Bytes, of those outside, of the table of token embeddings.
    pub table: u64,
    /// Bytes of each repeated block: language model, vision tower.
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
                found.table += if tensor.place == Place::Table { bytes } else { 0 };
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

    /// Bytes of the two neighbours among a tower's blocks that are largest together: what is in memory at
    /// once of blocks that are streamed while it runs.
    pub fn two_blocks_of(&self, tower: TowerKind) -> u64 {
        let blocks = &self.towers[tower as usize];
        let pairs = blocks.windows(2).map(|pair| pair[0] + pair[1]);
        pairs.chain(blocks.first().copied()).max().unwrap_or(0)
    }

    /// Bytes of two neighbours in the tower that takes more.
    pub fn two_blocks(&self) -> u64 {
        self.two_blocks_of(TowerKind::Text).max(self.two_blocks_of(TowerKind::Vision))
    }

    /// Bytes in memory at once.
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
            _ if table == TablePlace::Host && tensor.place == Place::Table => 3,
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

/// The tensors that training loads of these modules, in their order. An LM head of its own is not among
/// them.
pub fn frozen_tensors(rules: Rules, modules: &[Module]) -> Vec<FrozenTensor> {
    let mut tensors = Vec::new();
    let mut add = |name: String, elements, is_matrix, packs| {
        let place = (rules.place)(&name);
        tensors.push(FrozenTensor { name, elements, is_matrix, packs, place });
    };
    for Module { name, kind, .. } in modules {
        match *kind {
            ModuleKind::Linear { head: true, .. } => {}
            ModuleKind::Linear { inputs, outputs, .. } => {
                let packs = (rules.packs)(name).then_some([outputs, inputs]);
                add(format!("{name}.weight"), inputs * outputs, true, packs);
            }
            ModuleKind::Convolution { shape, .. } => {
                add(format!("{name}.weight"), shape.iter().product(), true, None);
            }
            ModuleKind::Embedding { rows, width, .. } => {
                add(format!("{name}.weight"), rows * width, true, None);
            }
            ModuleKind::Norm { width, .. } => add(format!("{name}.weight"), width, false, None),
            ModuleKind::Other => {}
        }
        if let Some(len) = kind.bias() {
            add(format!("{name}.bias"), len, false, None);
        }
    }
    tensors
}

/// The weight of the LM head, where it is a matrix of its own: for tasks that ask for logits.
pub fn head_tensor(modules: &[Module]) -> Option<FrozenTensor> {
    let tied = |module: &Module| matches!(module.kind, ModuleKind::Embedding { tied: true, .. });
    if modules.iter().any(tied) {
        return None;
    }
    modules.iter().find_map(|module| match module.kind {
        ModuleKind::Linear { inputs, outputs, head: true, .. } => Some(FrozenTensor {
            name: format!("{}.weight", module.name),
            elements: inputs * outputs,
            is_matrix: true,
            packs: None,
            place: Place::Head,
        }),
        _ => None,
    })
}
