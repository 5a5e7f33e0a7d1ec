//! Which part of the flat parameter buffer belongs to which rank, and what applies where in it.

use std::ops::Range;

use coxswain_proto::ids::Rank;

use crate::collective::Cuts;
use coxswain_nn::params::{Group, TrainableLayout};

/// One rank's place in a flat parameter buffer that is cut into parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    cuts: Cuts,
    rank: usize,
}

/// A run of this rank's elements to which one learning rate and one decay rule apply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Positions in the flat parameter buffer.
    pub range: Range<usize>,
    /// Whose learning rate.
    pub group: Group,
    /// Whether weights decay.
    pub decay: bool,
}

impl Partition {
    /// The part of `rank` among these.
    pub fn new(cuts: Cuts, rank: Rank) -> Self {
        let rank = rank.0 as usize;
        assert!(rank < cuts.world(), "rank {rank} in a world of {}", cuts.world());
        Self { cuts, rank }
    }

    /// The part of the rank `distance` before this one, around the ring.
    pub fn before(&self, distance: usize) -> Self {
        let world = self.world();
        Self { cuts: self.cuts.clone(), rank: (self.rank + world - distance % world) % world }
    }

    /// All parts.
    pub fn cuts(&self) -> &Cuts {
        &self.cuts
    }

    /// Elements of the whole buffer.
    pub fn whole_len(&self) -> usize {
        self.cuts.len()
    }

    /// Ranks that share it.
    pub fn world(&self) -> usize {
        self.cuts.world()
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        Rank(self.rank as u32)
    }

    /// This rank's elements.
    pub fn own(&self) -> Range<usize> {
        self.cuts.part(self.rank)
    }

    /// This rank's elements by what applies to them, in order: parameters cut at the borders of the shard,
    /// neighbours with the same rules joined.
    pub fn segments(&self, layout: &TrainableLayout) -> Vec<Segment> {
        let mut segments: Vec<Segment> = Vec::new();
        for param in layout.params() {
            let range = intersect(&self.own(), &(param.offset..param.offset + param.len()));
            if range.is_empty() {
                continue;
            }
            match segments.last_mut() {
                Some(last) if last.group == param.group && last.decay == param.decay => {
                    last.range.end = range.end
                }
                _ => segments.push(Segment { range, group: param.group, decay: param.decay }),
            }
        }
        segments
    }
}

/// A range seen from `origin`; an empty one may lie anywhere.
pub(super) fn shifted(range: &Range<usize>, origin: usize) -> Range<usize> {
    match range.is_empty() {
        true => 0..0,
        false => range.start - origin..range.end - origin,
    }
}

/// What two ranges share; empty if nothing.
pub(super) fn intersect(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use coxswain_nn::params::Init;

    fn layout(params: &[(usize, Group, bool)]) -> TrainableLayout {
        let mut layout = TrainableLayout::default();
        for (number, &(len, group, decay)) in params.iter().enumerate() {
            layout.add(format!("p{number}"), &[len], group, decay, Init::Zeros);
        }
        layout
    }

    proptest! {
        #[test]
        fn the_parts_of_all_ranks_make_up_the_whole_and_every_element_has_its_rule(
            params in prop::collection::vec((0usize..40, 0usize..3, any::<bool>()), 0..12),
            world in 1usize..9,
        ) {
            let groups = [Group::LORA, Group("head"), Group("other")];
            let params: Vec<_> = params.into_iter().map(|(len, group, decay)| (len, groups[group], decay)).collect();
            let layout = layout(&params);
            let rules: Vec<_> = params.iter().flat_map(|&(len, group, decay)| vec![(group, decay); len]).collect();
            let mut next = 0;
            for rank in 0..world {
                let part = Partition::new(Cuts::equal(layout.len(), world), Rank(rank as u32));
                prop_assert_eq!(part.own().start, next);
                for segment in part.segments(&layout) {
                    prop_assert_eq!(segment.range.start, next);
                    next = segment.range.end;
                    prop_assert!(rules[segment.range].iter().all(|r| *r == (segment.group, segment.decay)));
                }
                prop_assert_eq!(part.own().end, next);
            }
            prop_assert_eq!(next, layout.len());
        }
    }

    #[test]
    fn neighbours_with_the_same_rules_are_one_segment() {
        let layout = layout(&[(4, Group::LORA, true), (4, Group::LORA, true), (4, Group::LORA, false)]);
        let segments = Partition::new(Cuts::equal(12, 1), Rank(0)).segments(&layout);
        assert_eq!(segments.iter().map(|s| s.range.clone()).collect::<Vec<_>>(), [0..8, 8..12]);
    }
}
