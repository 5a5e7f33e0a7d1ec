//! Everything that trains, in one flat fp32 space.
//!
//! ```text
//! TrainableLayout   names, shapes, groups, offsets          known before any tensor exists
//! Trainables<B>     the values: one flat tensor, and a view of it per parameter
//! ParamScope<T>     the same parameters as leaves of one tape, while one block runs
//! Notes<B>          outputs that one run of a block leaves to the next (`notes`)
//! FlatGrads         gradients summed over micro-batches, same offsets, host memory
//! ```
//!
//! Frozen weights never come here. The optimizer (`zero`) sees only the flat space and never learns what a model is.

mod notes;

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    fmt,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use burn::tensor::{Tensor, TensorData, Transaction, backend::AutodiffBackend};

use self::notes::Notebook;
pub use self::notes::{Keep, LinearInputs, Notes};
use crate::{
    kernels::{GradientSlot, ModelBackend, Tape},
    rng::{Key, Purpose},
};

/// A trainable tensor's number in its layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamId(pub usize);

/// Which learning rate applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Group {
    /// LoRA matrices.
    Lora,
    /// The action expert.
    Expert,
    /// The sensor encoder.
    Sensor,
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lora => "lora",
            Self::Expert => "expert",
            Self::Sensor => "sensor",
        })
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
}

/// One trainable tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Unique; the name it is saved under. PEFT keys for LoRA, `expert.…` and `sensor.…` for the rest.
    pub name: String,
    /// Row-major.
    pub shape: Vec<usize>,
    /// Learning-rate group.
    pub group: Group,
    /// Whether weight decay applies (matrices yes; biases, gains, positions no).
    pub decay: bool,
    /// Initial values.
    pub init: Init,
    /// Position of its first element in the flat space.
    pub offset: usize,
}

impl ParamSpec {
    /// Elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its elements in the flat space.
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

    /// Elements of the flat space, without padding.
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

    /// Initial values of the whole space; the same on every rank.
    pub fn initial_values(&self, seed: u64) -> Vec<f32> {
        let mut flat = vec![0.0; self.len];
        for (number, param) in self.params.iter().enumerate() {
            let key = Key { seed, purpose: Purpose::Init, step: number as u64, sample: 0, repeat: 0 };
            let values = &mut flat[param.offset..param.offset + param.len()];
            match param.init {
                Init::Zeros => {}
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

/// The current values, on a device: one flat tensor; parameters are views of it.
pub struct Trainables<B: ModelBackend> {
    layout: TrainableLayout,
    flat: Tensor<B, 1>,
}

impl<B: ModelBackend> Trainables<B> {
    /// Takes over `values`, which must have the layout's length.
    pub fn new(layout: TrainableLayout, values: Vec<f32>, device: &B::Device) -> Self {
        assert_eq!(layout.len(), values.len(), "flat values do not fit the layout");
        let len = values.len();
        Self { layout, flat: Tensor::from_data(TensorData::new(values, [len]), device) }
    }

    /// The layout.
    pub fn layout(&self) -> &TrainableLayout {
        &self.layout
    }

    /// Replaces all values.
    pub fn set(&mut self, values: Vec<f32>) {
        assert_eq!(self.layout.len(), values.len(), "flat values do not fit the layout");
        let (len, device) = (values.len(), self.flat.device());
        self.flat = Tensor::from_data(TensorData::new(values, [len]), &device);
    }

    /// Takes all values out, without a copy if they are in host memory and no view of them is alive. Nothing may use the
    /// trainables until [`Trainables::set`] puts values back: this pair is how the optimizer updates them in place.
    pub fn take(&mut self) -> Vec<f32> {
        let nothing = Tensor::from_data(TensorData::new(Vec::<f32>::new(), [0]), &self.flat.device());
        let flat = std::mem::replace(&mut self.flat, nothing);
        flat.into_data().into_vec().expect("trainables are fp32 by construction")
    }

    /// Lends all values, to be written to a file. Without a copy where [`Trainables::take`] makes none: an expert's are half a
    /// gigabyte and more.
    pub fn lend<R>(&mut self, read: impl FnOnce(&TrainableLayout, &[f32]) -> R) -> R {
        let values = self.take();
        let result = read(&self.layout, &values);
        self.set(values);
        result
    }

    /// A copy of all values in host memory.
    pub fn to_vec(&self) -> Vec<f32> {
        self.flat.clone().into_data().into_vec().expect("trainables are fp32 by construction")
    }

    /// A copy of the first `len` values in host memory.
    pub fn leading_values(&self, len: usize) -> Vec<f32> {
        let leading = self.flat.clone().narrow(0, 0, len);
        leading.into_data().into_vec().expect("trainables are fp32 by construction")
    }

    /// A parameter as a matrix, without a copy; one of a single axis is a row.
    fn view(&self, id: ParamId) -> Tensor<B, 2> {
        let param = self.layout.get(id);
        let shape = match param.shape[..] {
            [rows, cols] => [rows, cols],
            _ => [1, param.len()],
        };
        B::matrix_view(self.flat.clone(), param.offset, shape)
    }
}

/// The parameters as one tape sees them: constants on a plain backend, leaves under autodiff.
///
/// Made for one block at a time: leaves are created when first asked for, and [`ParamScope::collect`] sums their
/// gradients into the flat buffer after that block's backward pass.
pub struct ParamScope<'a, T: Tape> {
    trainables: &'a Trainables<T::Base>,
    tracked: fn(ParamView<T>) -> ParamView<T>,
    leaves: RefCell<HashMap<ParamId, ParamView<T>>>,
    left: Arc<Mutex<Vec<LeftGradient<T::Base>>>>,
    notebook: Notebook<T::Base>,
}

/// What the gradient of a linear layer's weight is made of, left by the backward pass for [`ParamScope::collect`].
struct LeftGradient<B: ModelBackend> {
    weight: ParamId,
    dy_no: Tensor<B, 2>,
    x_ni: Tensor<B, 2>,
}

/// A parameter on a tape, as [`Trainables::view`] gives it; anything but a matrix is shaped on use.
type ParamView<T> = Tensor<T, 2>;

impl<'a, T: Tape> ParamScope<'a, T> {
    /// Parameters as constants.
    pub fn frozen(trainables: &'a Trainables<T::Base>) -> Self {
        Self::new(trainables, |view| view)
    }

    fn new(trainables: &'a Trainables<T::Base>, tracked: fn(ParamView<T>) -> ParamView<T>) -> Self {
        let notebook = Notebook::Closed;
        Self { trainables, tracked, leaves: RefCell::default(), left: Arc::default(), notebook }
    }

    /// One linear layer, computed or, where this scope reads notes, recalled from them.
    pub fn noted_linear(&self, keep: Keep, layer: LinearInputs<T>) -> Tensor<T, 2> {
        self.notebook.linear(keep, layer)
    }

    /// The parameter as a tensor of `D` axes.
    ///
    /// Panics if the parameter has another number of axes: a programming error, not an input error.
    pub fn get<const D: usize>(&self, id: ParamId) -> Tensor<T, D> {
        let param = self.trainables.layout.get(id);
        let shape: [usize; D] = param.shape.clone().try_into().unwrap_or_else(|shape: Vec<usize>| {
            panic!("parameter {} has {} axes, asked for with {D}", param.name, shape.len())
        });
        let leaf = self.leaf(id);
        match D {
            2 => Tensor::from_primitive(leaf.into_primitive()),
            _ => leaf.reshape(shape),
        }
    }

    /// `x w^T + bias` with parameters of this scope. `x_ni`; returns `[n, o]`.
    ///
    /// The weight's gradient never exists as a tensor of the tape: [`ParamScope::collect`] makes it where it is summed.
    pub fn linear(&self, x_ni: Tensor<T, 2>, weight: ParamId, bias: Option<ParamId>) -> Tensor<T, 2> {
        let left = Arc::clone(&self.left);
        let bias = bias.map(|bias| self.get(bias));
        T::linear_leaving_weight(x_ni, self.get(weight), bias, move |dy_no, x_ni| {
            let mut left = left.lock().unwrap_or_else(PoisonError::into_inner);
            left.push(LeftGradient { weight, dy_no, x_ni });
        })
    }

    fn leaf(&self, id: ParamId) -> ParamView<T> {
        let mut leaves = self.leaves.borrow_mut();
        leaves.entry(id).or_insert_with(|| (self.tracked)(T::lift(self.trainables.view(id)))).clone()
    }
}

impl<'a, B: Tape<Base = B>> ParamScope<'a, B> {
    /// Parameters as constants, and notes taken of the linear layers: of their outputs only if `outputs`.
    pub fn noting(trainables: &'a Trainables<B>, outputs: bool) -> Self {
        let notebook = Notebook::Writing { outputs, notes: RefCell::default() };
        Self { notebook, ..Self::frozen(trainables) }
    }

    /// The notes taken.
    pub fn into_notes(self) -> Notes<B> {
        match self.notebook {
            Notebook::Writing { notes, .. } => notes.into_inner(),
            Notebook::Closed | Notebook::Reading(_) => Notes::default(),
        }
    }
}

impl<'a, T: Tape + AutodiffBackend<InnerBackend = <T as Tape>::Base>> ParamScope<'a, T> {
    /// Parameters as leaves that gather gradients.
    pub fn tracked(trainables: &'a Trainables<<T as Tape>::Base>) -> Self {
        Self::new(trainables, |view| view.require_grad())
    }

    /// The same for a block that has run before: its linear layers are recalled from `notes` where they are in there.
    pub fn recalling(trainables: &'a Trainables<<T as Tape>::Base>, notes: Notes<T::Base>) -> Self {
        Self { notebook: Notebook::Reading(RefCell::new(notes)), ..Self::tracked(trainables) }
    }

    /// Adds the gradients of every leaf that was used to `into`.
    pub fn collect(self, grads: &mut T::Gradients, into: &mut FlatGrads) {
        let mut leaves: Vec<_> = self.leaves.into_inner().into_iter().collect();
        leaves.sort_by_key(|(id, _)| *id);
        // One transaction for all of them: a device is waited for once a block, not once a parameter.
        let mut read = Transaction::default();
        let mut reached = Vec::with_capacity(leaves.len());
        for (id, leaf) in leaves {
            if let Some(grad) = leaf.grad_remove(grads) {
                read = read.register(grad);
                reached.push(id);
            }
        }
        let values = if reached.is_empty() { Vec::new() } else { read.execute() };
        for (id, grad) in reached.into_iter().zip(values) {
            let grad = grad.as_slice::<f32>().expect("gradients of fp32 leaves are fp32");
            into.slot(self.trainables.layout.get(id)).add(grad);
        }
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        for LeftGradient { weight, dy_no, x_ni } in left.drain(..) {
            let slot = into.slot(self.trainables.layout.get(weight));
            T::Base::add_linear_weight_gradient(dy_no, x_ni, slot);
        }
    }
}

/// Gradients of the flat space, summed over the micro-batches of a step, in host memory.
///
/// A new step does not sweep the buffer: a parameter's first gradient overwrites what the last step left there, and only what
/// has received none is zeroed, when the sums are asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FlatGrads {
    values: Vec<f32>,
    /// Parameters that have received a gradient since [`FlatGrads::zero`]: offset to end.
    touched: BTreeMap<usize, usize>,
    /// Whether the elements of all others still hold something old.
    stale: bool,
}

impl FlatGrads {
    /// All zero.
    pub fn new(len: usize) -> Self {
        Self { values: vec![0.0; len], touched: BTreeMap::new(), stale: false }
    }

    /// Forgets everything.
    pub fn zero(&mut self) {
        self.touched.clear();
        self.stale = true;
    }

    /// The gradients. Between [`FlatGrads::zero`] and [`FlatGrads::values_mut`] only those of touched parameters are right.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The gradients, for scaling or in-place reduction.
    pub fn values_mut(&mut self) -> &mut Vec<f32> {
        if std::mem::take(&mut self.stale) {
            let mut start = 0;
            for (&offset, &end) in &self.touched {
                self.values[start..offset].fill(0.0);
                start = end;
            }
            self.values[start..].fill(0.0);
        }
        &mut self.values
    }

    /// Whether this parameter received a gradient.
    pub fn touched(&self, param: &ParamSpec) -> bool {
        self.touched.contains_key(&param.offset)
    }

    /// Where the next gradient of this parameter goes.
    fn slot(&mut self, param: &ParamSpec) -> GradientSlot<'_> {
        let range = param.range();
        let stale = self.touched.insert(range.start, range.end).is_none();
        GradientSlot { values: &mut self.values[range], stale }
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;

    use super::*;

    #[test]
    fn a_parameter_is_a_view_of_the_flat_space() {
        let mut layout = TrainableLayout::default();
        layout.add("a".into(), &[5], Group::Expert, true, Init::Zeros);
        let id = layout.add("b".into(), &[2, 3], Group::Expert, true, Init::Zeros);
        let values: Vec<f32> = (0..11).map(|x| x as f32).collect();
        let (begin, end) = (values.as_ptr() as usize, values.as_ptr_range().end as usize);
        let trainables = Trainables::<Flex>::new(layout, values, &Default::default());
        let matrix = ParamScope::<Flex>::frozen(&trainables).get::<2>(id);
        let primitive = matrix.clone().into_primitive().tensor();
        let stored = primitive.bytes().as_ptr() as usize;
        assert!((begin..end).contains(&stored), "a copy was made");
        assert_eq!(matrix.into_data().into_vec::<f32>().unwrap(), [5.0, 6.0, 7.0, 8.0, 9.0, 10.0]);
    }

    #[test]
    fn taking_the_values_out_and_putting_them_back_copies_nothing() {
        let mut layout = TrainableLayout::default();
        let id = layout.add("w".into(), &[1000], Group::Expert, true, Init::Zeros);
        let values = vec![1.5f32; 1000];
        let at = values.as_ptr();
        let mut trainables = Trainables::<Flex>::new(layout, values, &Default::default());
        drop(trainables.view(id));
        let taken = trainables.take();
        assert!(taken.as_ptr() == at && taken == vec![1.5; 1000]);
        trainables.set(taken);
        assert_eq!(trainables.to_vec(), vec![1.5; 1000]);
    }

    #[test]
    fn a_new_step_forgets_the_last_one_without_a_sweep() {
        let mut layout = TrainableLayout::default();
        let [a, b, c] = ["a", "b", "c"].map(|name| {
            let id = layout.add(name.into(), &[2], Group::Expert, true, Init::Zeros);
            layout.get(id).clone()
        });
        let mut grads = FlatGrads::new(layout.len());
        for param in [&a, &b, &b, &c] {
            grads.slot(param).add(&[1.0, 2.0]);
        }
        assert_eq!(grads.values_mut()[..], [1.0, 2.0, 2.0, 4.0, 1.0, 2.0]);
        grads.values_mut().fill(9.0);
        grads.zero();
        grads.slot(&b).add(&[3.0, 3.0]);
        assert!(!grads.touched(&a) && grads.touched(&b));
        assert_eq!(grads.values_mut()[..], [0.0, 0.0, 3.0, 3.0, 0.0, 0.0]);
        grads.zero();
        assert_eq!(grads.values_mut()[..], [0.0; 6]);
    }
}
