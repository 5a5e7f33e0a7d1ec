//! The values of everything that trains, and parameters as one tape sees them.
//!
//! [`Trainables`] owns the flat tensor; a parameter is a view of it. A [`ParamScope`] lends views to the
//! blocks of the model: as constants, or as leaves whose gradients it adds to the flat sums when their
//! block's backward pass is done.
//!
//! The optimizer takes the whole buffer out ([`Trainables::take`]), changes it where it lies, and puts it
//! back; nothing is copied, in host memory or in a device's. What goes to files and to other generations is
//! read by the host ([`Trainables::lend`]).
//!
//! What this file does not do: update values (`zero`), or know which parameters a block has.

use std::{
    cell::RefCell,
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use crate::dtypes::ActivationsDtype;
use burn::tensor::{Tensor, backend::AutodiffBackend};

use super::{
    GradientSums, ParamId, TrainableLayout, held,
    notes::{Keep, Leave, LeavingLinear, LinearInputs, Notebook, NotedLinear, Notes},
};
use crate::kernels::{
    DropoutRows, JoinedLayers, LinearOps, ModelBackend, Tape,
    flat::{Flat, FlatOn},
};

/// The current values, on a device: one flat tensor; parameters are views of it.
pub struct Trainables<B: ModelBackend> {
    layout: TrainableLayout,
    /// At least as long as the layout; none while they are taken.
    flat: Option<Tensor<B, 1>>,
    /// What does not train; none where everything does.
    constants: Option<Tensor<B, 1>>,
    device: B::Device,
}

/// Values are not read while they are taken.
const THERE: &str = "values that were taken are put back before they are read";

impl<B: ModelBackend> Trainables<B> {
    /// Takes over `values`, of which the layout must have as many, constants at the end; none are looked at
    /// on a backend that has none.
    pub fn new(layout: TrainableLayout, mut values: Vec<f32>, device: &B::Device) -> Self {
        let constant = layout.whole_len() - layout.len();
        let on_device = |values: Vec<f32>, len| match B::VALUES {
            true => B::Flat::of(&B::Flat::place(device), values).into_tensor(device),
            false => Tensor::zeros([len], device),
        };
        if B::VALUES {
            assert_eq!(layout.whole_len(), values.len(), "flat values do not fit the layout");
        }
        let constants = (constant > 0).then(|| {
            let constants = values.split_off(values.len().saturating_sub(constant));
            values.shrink_to_fit();
            on_device(constants, constant)
        });
        let flat = on_device(values, layout.len());
        Self { layout, flat: Some(flat), constants, device: device.clone() }
    }

    /// The layout.
    pub fn layout(&self) -> &TrainableLayout {
        &self.layout
    }

    /// Where they are.
    pub fn device(&self) -> B::Device {
        self.device.clone()
    }

    /// Replaces all values.
    pub fn set(&mut self, values: Vec<f32>) {
        self.put(B::Flat::of(&B::Flat::place(&self.device), values));
    }

    /// Takes all values out to where `F` has them, without a copy if they are there and no view of them is
    /// alive. Nothing may use the trainables until [`Trainables::put`] puts values back: this pair is how the
    /// optimizer updates them in place.
    pub fn take<F: FlatOn<B>>(&mut self) -> F {
        F::from_tensor(self.flat.take().expect(THERE), self.layout.len())
    }

    /// The values from now on.
    pub fn put(&mut self, values: impl FlatOn<B>) {
        assert_eq!(self.layout.len(), values.len(), "flat values do not fit the layout");
        self.flat = Some(values.into_tensor(&self.device));
    }

    /// Lends all values to the host, to be written to a file. Without a copy where they are in host memory:
    /// those of a large head are half a gigabyte and more. They come back even if `read` unwinds, as an
    /// out-of-memory does.
    pub fn lend<R>(&mut self, read: impl FnOnce(&TrainableLayout, &[f32]) -> R) -> R {
        let lent = LentValues { values: Some(self.take()), trainables: self };
        let values = lent.values.as_ref().map(|values| values.read(0..values.len())).unwrap_or_default();
        read(&lent.trainables.layout, &values)
    }

    /// Lends all values with the constants behind them, for what a user takes away.
    pub fn lend_whole<R>(&mut self, read: impl FnOnce(&TrainableLayout, &[f32]) -> R) -> R {
        let Some(constants) = self.constants.clone() else { return self.lend(read) };
        let constants: Vec<f32> =
            constants.into_data().into_vec().expect("constants are fp32 by construction");
        self.lend(|layout, values| read(layout, &[values, &constants].concat()))
    }

    /// A copy of all values in host memory.
    pub fn to_vec(&self) -> Vec<f32> {
        self.leading_values(self.layout.len())
    }

    /// A copy of the first `len` values in host memory.
    pub fn leading_values(&self, len: usize) -> Vec<f32> {
        if len == 0 {
            return Vec::new();
        }
        let leading = self.flat.clone().expect(THERE).narrow(0, 0, len);
        leading.into_data().into_vec().expect("trainables are fp32 by construction")
    }

    /// A parameter as a matrix, without a copy; one of a single axis is a row, and of one with more than two
    /// all but the first are one.
    fn view(&self, id: ParamId) -> Tensor<B, 2> {
        let param = self.layout.get(id);
        let shape = match param.shape[..] {
            [rows, _, ..] => [rows, param.len() / rows.max(1)],
            _ => [1, param.len()],
        };
        match id {
            ParamId::Trained(_) => B::matrix_view(self.flat.clone().expect(THERE), param.offset, shape),
            ParamId::Constant(_) => {
                let constants = self.constants.clone().expect("a layout with constants has their values");
                B::matrix_view(constants, param.offset - self.layout.len(), shape)
            }
        }
    }
}

/// Values on loan; put back when it ends, however it ends.
struct LentValues<'a, B: ModelBackend> {
    values: Option<B::Flat>,
    trainables: &'a mut Trainables<B>,
}

impl<B: ModelBackend> Drop for LentValues<'_, B> {
    fn drop(&mut self) {
        self.values.take().into_iter().for_each(|values| self.trainables.put(values));
    }
}

/// The parameters as one tape sees them: constants on a plain backend, leaves under autodiff.
///
/// Made for one block at a time: leaves are created when first asked for, and [`ParamScope::collect`] sums
/// their gradients into the flat buffer after that block's backward pass.
pub struct ParamScope<'a, T: Tape> {
    trainables: &'a Trainables<T::Base>,
    tracked: fn(ParamView<T>) -> ParamView<T>,
    leaves: RefCell<HashMap<ParamId, ParamView<T>>>,
    left: Arc<Mutex<Vec<LeftGradient<T::Base>>>>,
    notebook: Notebook<T::Base>,
    activations: ActivationsDtype,
    dropout: RefCell<Option<DropoutRows<T::Base>>>,
}

/// What the gradient of a linear layer's weight is made of, left by the backward pass for
/// [`ParamScope::collect`].
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
        let (notebook, activations) = (Notebook::Closed, ActivationsDtype::Float32);
        let (leaves, left) = (RefCell::default(), Arc::default());
        Self { trainables, tracked, leaves, left, notebook, activations, dropout: RefCell::default() }
    }

    /// This scope for a block whose values are of this precision where they may be kept (`held`); float32
    /// unless said.
    pub fn holding(self, activations: ActivationsDtype) -> Self {
        Self { activations, ..self }
    }

    /// This scope for a block that trains on these rows, whose adapters drop what their module's rate says;
    /// nothing is dropped unless said.
    pub fn dropping(self, dropout: Option<DropoutRows<T::Base>>) -> Self {
        Self { dropout: RefCell::new(dropout), ..self }
    }

    /// Runs what reads the rows of a side input; where the block drops nothing of its own, nothing is dropped
    /// there.
    pub fn reading<R>(&self, side: Option<&DropoutRows<T::Base>>, run: impl FnOnce() -> R) -> R {
        let own = self.dropout.borrow().clone();
        let (Some(own), Some(side)) = (own, side) else { return run() };
        self.dropout.replace(Some(side.clone()));
        let found = run();
        self.dropout.replace(Some(own));
        found
    }

    /// The rows of this block's inputs, if anything of them may be dropped.
    pub fn dropout_rows(&self) -> Option<DropoutRows<T>> {
        self.dropout.borrow().clone().map(|rows| rows.changed(T::lift_words))
    }

    /// Linear layers of one input, computed or, where this scope reads notes, recalled from them.
    pub fn noted_linears<const N: usize>(
        &self,
        x_ni: Tensor<T, 2>,
        layers: [(Keep, NotedLinear<T>); N],
    ) -> [Tensor<T, 2>; N] {
        let layers = layers.map(|(keep, layer)| (keep, self.leaving(layer)));
        let outputs = self.notebook.linears(self.activations, x_ni, layers.into());
        outputs.try_into().expect("a layer has an output")
    }

    /// Linear layers of one input as one product, likewise; `keeps` is of each of them.
    pub fn noted_joined(&self, x_ni: Tensor<T, 2>, keeps: &[Keep], layers: JoinedLayers<T>) -> Tensor<T, 2> {
        self.notebook.joined(self.activations, x_ni, keeps, layers)
    }

    /// `x` plus a linear layer, the output of half a block: what layer recompute keeps as the next half's
    /// input.
    pub fn noted_residual(&self, x_nd: Tensor<T, 2>, layer: LinearInputs<T>) -> Tensor<T, 2> {
        let LinearInputs { x_ni, layer } = layer;
        self.notebook.last(self.activations, x_nd, x_ni, self.leaving(layer))
    }

    /// `x` plus `y`, the output of half a block.
    pub fn residual(&self, x_nd: Tensor<T, 2>, y_nd: Tensor<T, 2>) -> Tensor<T, 2> {
        held::residual(self.activations, x_nd).plus(y_nd)
    }

    fn leaving(&self, linear: NotedLinear<T>) -> LeavingLinear<T> {
        let NotedLinear { layer, weight, magnitude_o } = linear;
        let leave = weight.map(|weight| Box::new(self.leave(weight)) as Leave<T::Base>);
        LeavingLinear { layer, leave, magnitude_o }
    }

    /// The parameter as a tensor of `D` axes; as a matrix, if it is asked for as one and has more.
    ///
    /// Panics if the parameter has another number of axes: a programming error, not an input error.
    pub fn get<const D: usize>(&self, id: ParamId) -> Tensor<T, D> {
        let param = self.trainables.layout.get(id);
        let leaf = self.leaf(id);
        if D == 2 && param.shape.len() >= 2 {
            return Tensor::from_primitive(leaf.into_primitive());
        }
        let shape: [usize; D] = param.shape.clone().try_into().unwrap_or_else(|shape: Vec<usize>| {
            panic!("parameter {} has {} axes, requested with {D}", param.name, shape.len())
        });
        leaf.reshape(shape)
    }

    /// `x w^T + bias` with parameters of this scope. `x_ni`; returns `[n, o]`.
    ///
    /// The weight's gradient never exists as a tensor of the tape: [`ParamScope::collect`] makes it where it
    /// is summed.
    pub fn linear(&self, x_ni: Tensor<T, 2>, weight: ParamId, bias: Option<ParamId>) -> Tensor<T, 2> {
        let bias = bias.map(|bias| self.get(bias));
        if let ParamId::Constant(_) = weight {
            return <T as LinearOps>::linear(x_ni, self.get(weight), bias);
        }
        T::linear_leaving_weight(x_ni, self.get(weight), bias, self.leave(weight))
    }

    /// `residual` plus such a layer, the output of half a block.
    pub fn linear_residual(
        &self,
        residual_no: Tensor<T, 2>,
        x_ni: Tensor<T, 2>,
        weight: ParamId,
        bias: Option<ParamId>,
    ) -> Tensor<T, 2> {
        let (constant, leave) = (matches!(weight, ParamId::Constant(_)), self.leave(weight));
        let (weight, bias) = (self.get(weight), bias.map(|bias| self.get(bias)));
        if self.notebook.is_reading() {
            // Any value of the right shape is as good as another.
            let unread_no = T::lower(residual_no.clone());
            if constant {
                let y_no = T::linear_cached(x_ni, weight, bias, T::lift(unread_no));
                return T::sum_unread(residual_no, y_no);
            }
            let y_no = T::linear_leaving_weight_cached(unread_no, x_ni, weight, bias, leave);
            return T::sum_unread(residual_no, y_no);
        }
        let residual = held::residual(self.activations, residual_no);
        match constant {
            true => T::linear_residual(residual, x_ni, weight, bias),
            false => T::linear_leaving_weight_residual(residual, x_ni, weight, bias, leave),
        }
    }

    /// What takes the makings of a weight's gradient in a backward pass.
    fn leave(
        &self,
        weight: ParamId,
    ) -> impl FnOnce(Tensor<T::Base, 2>, Tensor<T::Base, 2>) + Send + use<T> + 'static {
        let left = Arc::clone(&self.left);
        move |dy_no, x_ni| {
            let mut left = left.lock().unwrap_or_else(PoisonError::into_inner);
            left.push(LeftGradient { weight, dy_no, x_ni });
        }
    }

    fn leaf(&self, id: ParamId) -> ParamView<T> {
        let mut leaves = self.leaves.borrow_mut();
        let leaf = || {
            let view = T::lift(self.trainables.view(id));
            if let ParamId::Trained(_) = id { (self.tracked)(view) } else { view }
        };
        leaves.entry(id).or_insert_with(leaf).clone()
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

    /// Parameters as leaves of a block that has run before: its linear layers are recalled from `notes` where
    /// they are in there.
    pub fn recalling(trainables: &'a Trainables<<T as Tape>::Base>, notes: Notes<T::Base>) -> Self {
        Self { notebook: Notebook::Reading(RefCell::new(notes)), ..Self::tracked(trainables) }
    }

    /// Adds the gradients of every leaf that was used to `into`.
    pub fn collect(self, grads: &mut T::Gradients, into: &mut dyn GradientSums<T::Base>) {
        let layout = &self.trainables.layout;
        let mut leaves: Vec<_> = self.leaves.into_inner().into_iter().collect();
        leaves.sort_by_key(|(id, _)| *id);
        let reached = leaves.into_iter().filter_map(|(id, leaf)| Some((id, leaf.grad_remove(grads)?)));
        into.add(reached.map(|(id, gradient)| (layout.get(id), gradient)).collect());
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let makings =
            left.drain(..).map(|LeftGradient { weight, dy_no, x_ni }| (layout.get(weight), [dy_no, x_ni]));
        into.add_weight_gradients(makings.collect());
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;

    use super::*;
    use crate::params::{Group, Init};

    #[test]
    fn a_parameter_is_a_view_of_the_flat_namespace() {
        let mut layout = TrainableLayout::default();
        layout.add("a".into(), &[5], Group("head"), true, Init::Zeros);
        let id = layout.add("b".into(), &[2, 3], Group("head"), true, Init::Zeros);
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
    fn constants_lie_behind_what_trains_and_get_no_gradient() {
        let mut layout = TrainableLayout::default();
        let constant = layout.add_constant("tail.w".into(), &[2, 2], Group("tail"));
        let trained = layout.add("head.w".into(), &[2, 2], Group("head"), true, Init::Zeros);
        assert_eq!((layout.len(), layout.whole_len(), layout.get(constant).offset), (4, 8, 4));
        assert_eq!(layout.find("tail.w"), None);
        let values: Vec<f32> = (0..8).map(|x| x as f32).collect();
        let mut trainables = Trainables::<Flex>::new(layout.clone(), values.clone(), &Default::default());
        assert_eq!(trainables.to_vec(), values[..4]);
        trainables.set(vec![1.0; 4]);
        let x_ni = Tensor::from_data([[1.0, -1.0]], &Default::default());
        let run = |constant_first: bool| {
            let params = ParamScope::<burn::backend::Autodiff<Flex>>::tracked(&trainables);
            let order = if constant_first { [constant, trained] } else { [trained, constant] };
            let x_ni = Tensor::from_inner(x_ni.clone());
            let y_no = order.into_iter().fold(x_ni, |x_ni, weight| params.linear(x_ni, weight, None));
            let mut grads = crate::params::FlatGrads::new(layout.len());
            let value = y_no.clone().inner().into_data().into_vec::<f32>().unwrap();
            let mut of_leaves = y_no.sum().backward();
            params.collect(&mut of_leaves, &mut grads);
            (value, grads.values_mut().clone())
        };
        assert_eq!(run(true), (vec![-2.0, -2.0], vec![-1.0, -1.0, -1.0, -1.0]));
        // Through the constant `[[4, 5], [6, 7]]`, whose columns add up to 10 and 12.
        assert_eq!(run(false), (vec![0.0, 0.0], vec![10.0, -10.0, 12.0, -12.0]));
        let whole = trainables.lend_whole(|_, values| values.to_vec());
        assert_eq!(whole, [1.0, 1.0, 1.0, 1.0, 4.0, 5.0, 6.0, 7.0]);
    }

    #[test]
    fn taking_the_values_out_and_putting_them_back_copies_nothing() {
        let mut layout = TrainableLayout::default();
        let id = layout.add("w".into(), &[1000], Group("head"), true, Init::Zeros);
        let values = vec![1.5f32; 1000];
        let at = values.as_ptr();
        let mut trainables = Trainables::<Flex>::new(layout, values, &Default::default());
        drop(trainables.view(id));
        let taken: Vec<f32> = trainables.take();
        assert!(taken.as_ptr() == at && taken == vec![1.5; 1000]);
        trainables.set(taken);
        assert_eq!(trainables.to_vec(), vec![1.5; 1000]);
    }

    #[test]
    fn values_on_loan_come_back_even_if_the_borrower_unwinds() {
        let mut layout = TrainableLayout::default();
        layout.add("w".into(), &[4], Group("head"), true, Init::Zeros);
        let mut trainables = Trainables::<Flex>::new(layout, vec![2.5; 4], &Default::default());
        let borrower = std::panic::AssertUnwindSafe(|| {
            trainables.lend(|_, values| assert!(values.is_empty(), "out of memory"));
        });
        std::panic::catch_unwind(borrower).unwrap_err();
        assert_eq!(trainables.to_vec(), vec![2.5; 4]);
    }
}
