//! The sums of gradients, at the offsets of the flat parameter buffer, in the memory where that lies
//! ([`Flat`]).
//!
//! The backward pass sees them as [`GradientSums`]: it hands over the gradients of one block after another,
//! and does not wait until they have been taken.
//!
//! Where products are of float16, the loss is multiplied before the backward pass, so that small gradients
//! are not lost, and gradients are divided as they come in ([`GradientSums::scaled`]): what is summed is
//! always the gradient of the loss itself. Both factors are powers of two, so that scaling rounds nothing in
//! float32.
//!
//! What this file does not do: make gradients ([`ParamScope::collect`](super::ParamScope::collect)), add them
//! up ([`kernels::flat`](crate::kernels::flat)), or reduce them (`zero`).

use std::{collections::BTreeMap, ops::Range};

use burn::tensor::Tensor;

use super::{Group, ParamSpec, TrainableLayout};
use crate::kernels::{
    ModelBackend,
    flat::{Flat, FlatOn, Gradient, Lookups, Product, RowGradients},
};

/// Gradients of the flat parameter buffer, summed over the micro-batches of a step.
///
/// A new step does not sweep the buffer: a parameter's first gradient overwrites what the last step left
/// there, and only what has received none is zeroed, when the sums are asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FlatGrads<F = Vec<f32>> {
    values: F,
    /// Parameters that have received a gradient since [`FlatGrads::zero`]: offset to end.
    touched: BTreeMap<usize, usize>,
    /// Whether the elements of all others still hold something old.
    stale: bool,
    /// What the mean loss of a micro-batch is multiplied by; none if the loss is not scaled.
    loss_scale: Option<f64>,
    /// What gradients that come in are multiplied by: 1 over what the loss was.
    unscale: Option<f32>,
}

/// Where the backward pass leaves the gradients of a block.
pub trait GradientSums<B: ModelBackend> {
    /// What the loss sum of the micro-batch that is about to run backward is to be multiplied by, a power of
    /// two, given its valid elements; none if it is not scaled. Gradients that are added from here on are
    /// divided by it.
    fn scaled(&mut self, _valid: f64) -> Option<f32> {
        None
    }

    /// Adds the gradients of some parameters.
    fn add(&mut self, gradients: Vec<(&ParamSpec, Tensor<B, 2>)>);

    /// Adds the gradients of linear layers' weights, given what they are made of: `dy` and `x` of
    /// [`linear_weight_gradient`](LinearOps::linear_weight_gradient).
    fn add_weight_gradients(&mut self, makings: Vec<(&ParamSpec, [Tensor<B, 2>; 2])>);

    /// Adds the gradients of a table's rows, one for each place of `lookups`, `[places, d]`.
    fn add_rows(&mut self, table: &ParamSpec, lookups: &Lookups, values_nd: Tensor<B, 2>);
}

impl FlatGrads {
    /// All zero, in host memory.
    pub fn new(len: usize) -> Self {
        Self::at(&(), len)
    }
}

impl<F: Flat> FlatGrads<F> {
    /// All zero.
    pub fn at(place: &F::Place, len: usize) -> Self {
        let values = F::zeros(place, len);
        Self { values, touched: BTreeMap::new(), stale: false, loss_scale: None, unscale: None }
    }

    /// From now on the loss is scaled so that the mean over the valid elements of a micro-batch is multiplied
    /// by this power of two, up to a factor of two; none for no more scaling.
    pub fn scale_loss(&mut self, scale: Option<f64>) {
        (self.loss_scale, self.unscale) = (scale, None);
    }

    /// Forgets everything.
    pub fn zero(&mut self) {
        self.touched.clear();
        self.stale = true;
    }

    /// The gradients. Between [`FlatGrads::zero`] and [`FlatGrads::values_mut`] only those of touched
    /// parameters are right.
    pub fn values(&self) -> &F {
        &self.values
    }

    /// The gradients, for scaling or in-place reduction.
    pub fn values_mut(&mut self) -> &mut F {
        let kept = self.touched.clone();
        self.zero_between(kept)
    }

    /// The gradients for a step in which a group rests: what its elements hold is left as it is, and means
    /// nothing.
    pub fn values_but(&mut self, resting: Option<Group>, layout: &TrainableLayout) -> &mut F {
        let resting = layout.params().iter().filter(|param| Some(param.group) == resting);
        let mut kept = self.touched.clone();
        kept.extend(resting.map(|param| (param.range().start, param.range().end)));
        self.zero_between(kept)
    }

    fn zero_between(&mut self, kept: BTreeMap<usize, usize>) -> &mut F {
        if std::mem::take(&mut self.stale) {
            let mut start = 0;
            for (offset, end) in kept {
                self.values.clear(start..offset);
                start = end;
            }
            self.values.clear(start..self.values.len());
        }
        &mut self.values
    }

    /// Whether this parameter received a gradient.
    pub fn touched(&self, param: &ParamSpec) -> bool {
        self.touched.contains_key(&param.offset)
    }

    /// Where the next gradient of this parameter goes, and whether it is the first one.
    fn slot(&mut self, param: &ParamSpec) -> (Range<usize>, bool) {
        let range = param.range();
        let first = self.touched.insert(range.start, range.end).is_none();
        (range, first)
    }
}

/// A gradient of the loss itself.
fn unscaled<B: ModelBackend>(gradient: Tensor<B, 2>, factor: Option<f32>) -> Tensor<B, 2> {
    match factor {
        Some(factor) => gradient * factor,
        None => gradient,
    }
}

impl<B: ModelBackend, F: FlatOn<B>> GradientSums<B> for FlatGrads<F> {
    fn scaled(&mut self, valid: f64) -> Option<f32> {
        // Normal numbers of f32 both ways.
        let exponent = self.loss_scale?.log2() - valid.max(1.0).log2().floor();
        let factor = exponent.clamp(-126.0, 126.0).exp2() as f32;
        self.unscale = Some(1.0 / factor);
        Some(factor)
    }

    fn add(&mut self, gradients: Vec<(&ParamSpec, Tensor<B, 2>)>) {
        let unscale = self.unscale;
        let placed = gradients.into_iter().map(|(param, values)| {
            let (range, first) = self.slot(param);
            Gradient { range, first, values: unscaled(values, unscale) }
        });
        let placed = placed.collect();
        self.values.add(placed);
    }

    fn add_weight_gradients(&mut self, makings: Vec<(&ParamSpec, [Tensor<B, 2>; 2])>) {
        let unscale = self.unscale;
        let products = makings.into_iter().map(|(weight, [dy_no, x_ni])| {
            let (range, first) = self.slot(weight);
            Product { range, first, dy_no: unscaled(dy_no, unscale), x_ni }
        });
        let products = products.collect();
        self.values.add_products(products);
    }

    fn add_rows(&mut self, table: &ParamSpec, lookups: &Lookups, values_nd: Tensor<B, 2>) {
        let (range, first) = self.slot(table);
        let values_nd = unscaled(values_nd, self.unscale);
        self.values.add_rows(RowGradients { range, first, lookups, values_nd });
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;

    use super::*;
    use crate::{kernels::flat::OnDevice, params::Init};

    fn add(grads: &mut impl GradientSums<Flex>, param: &ParamSpec, values: [f32; 2]) {
        grads.add(vec![(param, Tensor::from_data([values], &Default::default()))]);
    }

    fn a_new_step_forgets_the_last_one<F: FlatOn<Flex>>() {
        let mut layout = TrainableLayout::default();
        let [a, b, c] = ["a", "b", "c"].map(|name| {
            let id = layout.add(name.into(), &[2], Group("head"), true, Init::Zeros);
            layout.get(id).clone()
        });
        let mut grads = FlatGrads::<F>::at(&F::place(&Default::default()), layout.len());
        for param in [&a, &b, &b, &c] {
            add(&mut grads, param, [1.0, 2.0]);
        }
        assert_eq!(grads.values_mut().read(0..6)[..], [1.0, 2.0, 2.0, 4.0, 1.0, 2.0]);
        grads.values_mut().edit(|values| values.fill(9.0));
        grads.zero();
        add(&mut grads, &b, [3.0, 3.0]);
        assert!(!grads.touched(&a) && grads.touched(&b));
        assert_eq!(grads.values_mut().read(0..6)[..], [0.0, 0.0, 3.0, 3.0, 0.0, 0.0]);
        grads.zero();
        assert_eq!(grads.values_mut().read(0..6)[..], [0.0; 6]);
    }

    #[test]
    fn a_new_step_forgets_the_last_one_without_a_sweep_wherever_the_sums_are() {
        a_new_step_forgets_the_last_one::<Vec<f32>>();
        a_new_step_forgets_the_last_one::<OnDevice<Flex>>();
    }

    #[test]
    fn a_scaled_loss_leaves_the_gradients_of_the_loss_itself() {
        let mut layout = TrainableLayout::default();
        let id = layout.add("a".into(), &[1, 2], Group("head"), true, Init::Zeros);
        let param = layout.get(id).clone();
        let matrix = |values: [f32; 2]| Tensor::<Flex, 2>::from_data([values], &Default::default());
        let mut grads = FlatGrads::new(layout.len());
        let grads_of: &mut dyn GradientSums<Flex> = &mut grads;
        assert_eq!(grads_of.scaled(3.0), None);
        grads.scale_loss(Some(1024.0));
        // The mean is scaled, by the power of two that is next below.
        for (valid, factor) in [(0.0, 1024.0), (1.0, 1024.0), (3.0, 512.0), (4.0, 256.0), (4096.0, 0.25)] {
            let grads_of: &mut dyn GradientSums<Flex> = &mut grads;
            assert_eq!(grads_of.scaled(valid), Some(factor));
            let (by, one) = (matrix([3.0 * factor, f32::MIN_POSITIVE * factor]), matrix([1.0, 0.0]));
            grads_of.add(vec![(&param, by.clone())]);
            grads_of.add_weight_gradients(vec![(&param, [by.narrow(1, 0, 1), one])]);
            assert_eq!(grads.values_mut()[..], [6.0, f32::MIN_POSITIVE], "{valid}");
            grads.zero();
        }
        grads.scale_loss(Some(2f64.powi(126)));
        let grads_of: &mut dyn GradientSums<Flex> = &mut grads;
        assert_eq!(grads_of.scaled(1.0), Some(2f32.powi(126)));
        grads_of.add(vec![(&param, matrix([f32::INFINITY, f32::NAN]))]);
        assert!(grads.values_mut().iter().all(|value| !value.is_finite()));
        grads.scale_loss(None);
        let grads_of: &mut dyn GradientSums<Flex> = &mut grads;
        assert_eq!(grads_of.scaled(1.0), None);
    }

    #[test]
    fn what_rests_is_not_swept() {
        let mut layout = TrainableLayout::default();
        let mut param = |name: &str, group| layout.add(name.into(), &[2], group, true, Init::Zeros);
        let ids = [
            param("a", Group::LORA),
            param("b", Group("head")),
            param("c", Group("head")),
            param("d", Group::LORA),
        ];
        let mut grads = FlatGrads::new(layout.len());
        grads.values_mut().fill(9.0);
        grads.zero();
        add(&mut grads, layout.get(ids[1]), [1.0, 2.0]);
        let swept = [9.0, 9.0, 1.0, 2.0, 0.0, 0.0, 9.0, 9.0];
        assert_eq!(grads.values_but(Some(Group::LORA), &layout)[..], swept);
        grads.zero();
        assert_eq!(grads.values_but(None, &layout)[..], [0.0; 8]);
    }
}
