//! The sums of gradients, in host memory, at the offsets of the flat space.
//!
//! What this file does not do: make gradients ([`ParamScope::collect`](super::ParamScope::collect)), or reduce them (`zero`).

use std::collections::BTreeMap;

use super::{Group, ParamSpec, TrainableLayout};
use crate::kernels::GradientSlot;

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
        let kept = self.touched.clone();
        self.zero_between(kept)
    }

    /// The same for a step in which a group rests: what its elements hold is left as it is, and means nothing.
    pub fn values_but(&mut self, resting: Option<Group>, layout: &TrainableLayout) -> &mut Vec<f32> {
        let resting = layout.params().iter().filter(|param| Some(param.group) == resting);
        let mut kept = self.touched.clone();
        kept.extend(resting.map(|param| (param.range().start, param.range().end)));
        self.zero_between(kept)
    }

    fn zero_between(&mut self, kept: BTreeMap<usize, usize>) -> &mut Vec<f32> {
        if std::mem::take(&mut self.stale) {
            let mut start = 0;
            for (offset, end) in kept {
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
    pub(super) fn slot(&mut self, param: &ParamSpec) -> GradientSlot<'_> {
        let range = param.range();
        let stale = self.touched.insert(range.start, range.end).is_none();
        GradientSlot { values: &mut self.values[range], stale }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::Init;

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

    #[test]
    fn what_rests_is_not_swept() {
        let mut layout = TrainableLayout::default();
        let mut add = |name: &str, group| layout.add(name.into(), &[2], group, true, Init::Zeros);
        let ids =
            [add("a", Group::Lora), add("b", Group::Expert), add("c", Group::Expert), add("d", Group::Lora)];
        let mut grads = FlatGrads::new(layout.len());
        grads.values_mut().fill(9.0);
        grads.zero();
        grads.slot(layout.get(ids[1])).add(&[1.0, 2.0]);
        let swept = [9.0, 9.0, 1.0, 2.0, 0.0, 0.0, 9.0, 9.0];
        assert_eq!(grads.values_but(Some(Group::Lora), &layout)[..], swept);
        grads.zero();
        assert_eq!(grads.values_but(None, &layout)[..], [0.0; 8]);
    }
}
