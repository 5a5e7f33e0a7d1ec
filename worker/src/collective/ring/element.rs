//! What travels around the ring, and how two of them become one.
//!
//! Both operations are commutative bit for bit (NaN payloads aside), so only the order in which ranks are
//! combined matters.

use half::bf16;

use crate::collective::Reduce;
use coxswain_nn::{
    bfloat16::{narrow, widen},
    kernels::vectorised,
};

/// A number the ring can carry.
pub(in crate::collective) trait Element: bytemuck::Pod {
    /// Name on the wire and in messages.
    const KIND: Kind;

    /// `self + other`.
    fn plus(self, other: Self) -> Self;

    /// The larger; NaN if either is.
    fn larger(self, other: Self) -> Self;
}

/// Element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::collective) enum Kind {
    /// The upper half of a float32.
    Bf16,
    F32,
    F64,
}

macro_rules! element {
    ($float:ty, $kind:expr) => {
        impl Element for $float {
            const KIND: Kind = $kind;

            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                if other > self || other.is_nan() { other } else { self }
            }
        }
    };
}
element!(f32, Kind::F32);
element!(f64, Kind::F64);

impl Element for bf16 {
    const KIND: Kind = Kind::Bf16;

    /// Rounded to the nearest, ties to even.
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        narrow(widen(self) + widen(other))
    }

    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        if other > self || other.is_nan() { other } else { self }
    }
}

/// `own = own (+) other`, element by element.
pub(super) fn combine<T: Element>(reduce: Reduce, own: &mut [T], other: &[T]) {
    vectorised(
        #[inline(always)]
        || {
            let pairs = own.iter_mut().zip(other);
            match reduce {
                Reduce::Sum => pairs.for_each(|(a, b)| *a = a.plus(*b)),
                Reduce::Max => pairs.for_each(|(a, b)| *a = a.larger(*b)),
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nan_on_either_side_survives_a_maximum() {
        for (a, b) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
            let mut own = [a];
            combine(Reduce::Max, &mut own, &[b]);
            assert!(own[0].is_nan());
        }
    }
}
