//! What trains, as names, shapes and places in the flat parameter buffer: known before any tensor exists.

use std::{fmt, ops::Range};

use crate::rng::{Key, Purpose};

/// A trainable tensor's number in its layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamId(pub usize);

/// A named group of trainables: they share a learning rate (`optimizer.lr.NAME`), and may rest together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Group(pub &'static str);

impl Group {
    /// LoRA matrices.
    pub const LORA: Self = Self("lora");
    /// Weights of the pretrained model that train themselves.
    pub const BASE: Self = Self("base");
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// Initial values of a trainable tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All zero.
    Zeros,
    /// Uniform in `[-bound, bound]`.
    Uniform(f32),
    /// Normal with this standard deviation.
    Normal(f32),
    /// The norms of the rows of the weight that an adapter is for: zero until it has been read.
    RowNorms,
    /// What a checkpoint has under the tensor's name: zero until it has been read there.
    Pretrained,
}

/// One trainable tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Unique; the name it is saved under. PEFT keys for LoRA, a prefix of the task's own for the rest.
    pub name: String,
    /// Row-major.
    pub shape: Vec<usize>,
    /// Learning-rate group.
    pub group: Group,
    /// Whether weight decay applies (matrices yes; biases, gains, positions no).
    pub decay: bool,
    /// Initial values.
    pub init: Init,
    /// Position of its first element in the flat parameter buffer.
    pub offset: usize,
}

impl ParamSpec {
    /// Elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its elements in the flat parameter buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len()
    }

    /// True for a tensor without elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// All trainable tensors of a run, in flat order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TrainableLayout {
    params: Vec<ParamSpec>,
    len: usize,
}

impl TrainableLayout {
    /// Adds a tensor at the end. Modules call this while they are built, in the same order on every rank.
    pub fn add(&mut self, name: String, shape: &[usize], group: Group, decay: bool, init: Init) -> ParamId {
        debug_assert!(self.params.iter().all(|p| p.name != name), "two trainables named {name}");
        let spec = ParamSpec { name, shape: shape.to_vec(), group, decay, init, offset: self.len };
        self.len += spec.len();
        self.params.push(spec);
        ParamId(self.params.len() - 1)
    }

    /// Elements of the flat parameter buffer, without padding.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when nothing trains.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The tensors in flat order.
    pub fn params(&self) -> &[ParamSpec] {
        &self.params
    }

    /// The groups, in the order of their first tensors.
    pub fn groups(&self) -> Vec<Group> {
        let mut groups = Vec::new();
        for param in &self.params {
            if !groups.contains(&param.group) {
                groups.push(param.group);
            }
        }
        groups
    }

    /// One tensor.
    pub fn get(&self, id: ParamId) -> &ParamSpec {
        &self.params[id.0]
    }

    /// The tensor of this name.
    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.params.iter().position(|p| p.name == name).map(ParamId)
    }

    /// The first tensors alone, as long as they are of this group. Numbers and offsets stay what they are.
    pub fn leading(&self, group: Group) -> Self {
        let params: Vec<_> = self.params.iter().take_while(|param| param.group == group).cloned().collect();
        let len = params.last().map_or(0, |param| param.range().end);
        Self { params, len }
    }

    /// Initial values of the whole buffer; the same on every rank.
    pub fn initial_values(&self, seed: u64) -> Vec<f32> {
        let mut flat = vec![0.0; self.len];
        for (number, param) in self.params.iter().enumerate() {
            let key = Key { seed, purpose: Purpose::Init, step: number as u64, sample: 0, repeat: 0 };
            let values = &mut flat[param.offset..param.offset + param.len()];
            match param.init {
                Init::Zeros | Init::RowNorms | Init::Pretrained => {}
                Init::Uniform(bound) => {
                    let mut draws = key.draws();
                    values.iter_mut().for_each(|v| *v = (2.0 * draws.uniform() - 1.0) * bound);
                }
                Init::Normal(std) => {
                    key.draws().normal(values);
                    values.iter_mut().for_each(|v| *v *= std);
                }
            }
        }
        flat
    }
}

/// The part of a buffer of `len` elements that belongs to `rank`: equal parts of `len / world` rounded up,
/// the last ones cut short (or empty) where the buffer ends. This is the partition of a buffer padded to a
/// multiple of `world`, without the padding.
pub fn chunk(len: usize, world: usize, rank: usize) -> Range<usize> {
    let size = len.div_ceil(world);
    (size * rank).min(len)..(size * (rank + 1)).min(len)
}
