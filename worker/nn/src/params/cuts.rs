//! Where the flat parameter buffer is cut into parts, one a rank.

use std::{ops::Range, sync::Arc};

use super::{TrainableLayout, chunk};

/// Where parts may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grain {
    /// Between any two elements: all parts but the last ones are equally long ([`chunk`]).
    Element,
    /// Between blocks of so many elements. Blocks begin at each parameter, whose last one may be short.
    Block(usize),
    /// Between parameters: each belongs to one rank whole.
    Parameter,
}

impl Grain {
    /// The parts of `world` ranks (at least one), as equal as the grain allows.
    pub fn cuts(self, layout: &TrainableLayout, world: usize) -> Cuts {
        let len = layout.len();
        let block = match self {
            Self::Element => return Cuts::equal(len, world),
            Self::Block(elements) => elements,
            Self::Parameter => usize::MAX,
        };
        let params = layout.params();
        let border = |rank: usize| {
            let ideal = chunk(len, world, rank).start;
            let number = params.partition_point(|param| param.range().end <= ideal);
            params.get(number).map_or(len, |param| nearest(ideal, param.range(), block))
        };
        Cuts { len, world, borders: Some((0..world).map(border).chain([len]).collect()) }
    }
}

/// The border of a block nearest to `ideal`, which is in this parameter; of two the first.
fn nearest(ideal: usize, param: Range<usize>, block: usize) -> usize {
    let below = param.start + (ideal - param.start) / block * block;
    let above = below.saturating_add(block).min(param.end);
    if ideal - below <= above - ideal { below } else { above }
}

/// Parts of a buffer, in the order of ranks: together the whole of it. Some may be empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cuts {
    len: usize,
    world: usize,
    /// Where each part begins, and the end; none where parts are equal.
    borders: Option<Arc<[usize]>>,
}

impl Cuts {
    /// The parts that [`chunk`] gives.
    pub fn equal(len: usize, world: usize) -> Self {
        Self { len, world, borders: None }
    }

    /// Elements of the buffer.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True without elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Parts.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Whether these are the parts that [`chunk`] gives.
    pub fn are_equal(&self) -> bool {
        self.borders.is_none()
    }

    /// The elements of a rank.
    pub fn part(&self, rank: usize) -> Range<usize> {
        match &self.borders {
            None => chunk(self.len, self.world, rank),
            Some(borders) => borders[rank]..borders[rank + 1],
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::params::{Group, Init};

    fn layout(lens: &[usize]) -> TrainableLayout {
        let mut layout = TrainableLayout::default();
        for (number, len) in lens.iter().enumerate() {
            layout.add(format!("p{number}"), &[*len], Group::LORA, true, Init::Zeros);
        }
        layout
    }

    proptest! {
        #[test]
        fn parts_follow_each_other_and_are_cut_where_they_may_be(
            lens in prop::collection::vec(0usize..90, 0..12), world in 1usize..9, block in 1usize..20,
        ) {
            let layout = layout(&lens);
            let grains = [Grain::Element, Grain::Block(block), Grain::Parameter];
            for (grain, allowed) in grains.into_iter().zip([1, block, usize::MAX]) {
                let cuts = grain.cuts(&layout, world);
                prop_assert_eq!((cuts.len(), cuts.world()), (layout.len(), world));
                let mut next = 0;
                for rank in 0..world {
                    let part = cuts.part(rank);
                    prop_assert_eq!(part.start, next);
                    next = part.end;
                    let inside = layout.params().iter().find(|p| p.range().contains(&part.start));
                    prop_assert!(inside.is_none_or(|p| (part.start - p.offset).is_multiple_of(allowed)));
                    // As near to an equal part as half a block at either end.
                    let equal = chunk(layout.len(), world, rank);
                    let longest = allowed.min(lens.iter().copied().max().unwrap_or(0));
                    prop_assert!(part.start.abs_diff(equal.start) <= longest.div_ceil(2));
                }
                prop_assert_eq!(next, layout.len());
            }
        }
    }

    #[test]
    fn a_cut_within_a_parameter_goes_to_the_nearest_border_of_its_blocks() {
        // Equal parts would begin at 0, 10, 20 and 30; blocks of four begin at 3.
        let cuts = Grain::Block(4).cuts(&layout(&[3, 36]), 4);
        assert_eq!([0, 1, 2, 3].map(|rank| cuts.part(rank)), [0..11, 11..19, 19..31, 31..39]);
        let cuts = Grain::Parameter.cuts(&layout(&[3, 36]), 4);
        assert_eq!([0, 1, 2, 3].map(|rank| cuts.part(rank)), [0..3, 3..3, 3..39, 39..39]);
    }
}
