//! What trains, as names, shapes and places in the flat parameter buffer: known before any tensor exists.

use std::{fmt, ops::Range};

use crate::rng::{Key, Purpose};

/// A tensor's number in its layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ParamId {
    /// Among those that train.
    Trained(usize),
    /// Among those that do not.
    Constant(usize),
}

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
    /// All one: a gain.
    Ones,
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

    /// Elements in the flat parameter buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len()
    }

    /// True for a tensor without elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// All trainable tensors of a run, in flat order, and behind them those of the same modules that do not
/// train: they are brought (`train.init_from`), stay what they are, and have neither gradients nor moments.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TrainableLayout {
    params: Vec<ParamSpec>,
    len: usize,
    /// Places begin behind the flat parameter buffer.
    constants: Vec<ParamSpec>,
}

impl TrainableLayout {
    /// Adds a tensor at the end. Modules call this while they are built, in the same order on every rank.
    pub fn add(&mut self, name: String, shape: &[usize], group: Group, decay: bool, init: Init) -> ParamId {
        debug_assert!(self.params.iter().all(|p| p.name != name), "two trainables named {name}");
        let spec = ParamSpec { name, shape: shape.to_vec(), group, decay, init, offset: self.len };
        self.len += spec.len();
        self.constants.iter_mut().for_each(|constant| constant.offset += spec.len());
        self.params.push(spec);
        ParamId::Trained(self.params.len() - 1)
    }

    /// Adds a tensor that does not train.
    pub fn add_constant(&mut self, name: String, shape: &[usize], group: Group) -> ParamId {
        let spec = ParamSpec {
            name,
            shape: shape.to_vec(),
            group,
            decay: false,
            init: Init::Zeros,
            offset: self.whole_len(),
        };
        self.constants.push(spec);
        ParamId::Constant(self.constants.len() - 1)
    }

    /// Takes weight decay off tensors of these names. One that never has a gradient stays what it is then.
    pub fn without_decay(&mut self, names: impl Fn(&str) -> bool) {
        self.params.iter_mut().filter(|param| names(&param.name)).for_each(|param| param.decay = false);
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

    /// The tensors that do not train, in the order of their places.
    pub fn constants(&self) -> &[ParamSpec] {
        &self.constants
    }

    /// The tensors that train, then the others.
    pub fn whole(&self) -> impl Iterator<Item = &ParamSpec> {
        self.params.iter().chain(&self.constants)
    }

    /// Elements of the flat parameter buffer and of the constants behind it.
    pub fn whole_len(&self) -> usize {
        self.constants.last().map_or(self.len, |constant| constant.range().end)
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
        match id {
            ParamId::Trained(number) => &self.params[number],
            ParamId::Constant(number) => &self.constants[number],
        }
    }

    /// The trainable tensor of this name.
    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.params.iter().position(|p| p.name == name).map(ParamId::Trained)
    }

    /// The first tensors alone, as long as they are of this group. Numbers and offsets stay what they are.
    pub fn leading(&self, group: Group) -> Self {
        let params: Vec<_> = self.params.iter().take_while(|param| param.group == group).cloned().collect();
        let len = params.last().map_or(0, |param| param.range().end);
        Self { params, len, constants: Vec::new() }
    }

    /// Initial values of the whole buffer; the same on every rank. Behind them zeros for the constants, until
    /// they are brought.
    pub fn initial_values(&self, seed: u64) -> Vec<f32> {
        let mut flat = vec![0.0; self.whole_len()];
        for (number, param) in self.params.iter().enumerate() {
            let key = Key { seed, purpose: Purpose::Init, step: number as u64, sample: 0, repeat: 0 };
            let values = &mut flat[param.offset..param.offset + param.len()];
            match param.init {
                Init::Zeros | Init::RowNorms | Init::Pretrained => {}
                Init::Ones => values.fill(1.0),
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
