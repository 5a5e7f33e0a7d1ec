//! Gaps and overlaps of ranges over `0..expected`.

use std::ops::Range;

/// How well ranges cover what they should.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    /// Positions of `0..expected` that lie in some range.
    pub covered: u64,
    /// Positions of `0..expected` that lie in none, in order.
    pub missing: Vec<Range<u64>>,
    /// What lies in a range for the second time, once for each time more, and what lies beyond `expected`.
    pub repeated: Vec<Range<u64>>,
}

impl Coverage {
    /// Lays the ranges over `0..expected`. Sorted by their beginnings, each either begins where the ones
    /// before it have reached, or leaves a gap, or overlaps.
    pub fn compute(expected: u64, mut ranges: Vec<Range<u64>>) -> Self {
        ranges.retain(|range| range.start < range.end);
        ranges.sort_by_key(|range| (range.start, range.end));
        let mut coverage = Self::default();
        let mut reached = 0;
        for range in ranges {
            let fresh = range.start.max(reached);
            if fresh > reached && reached < expected {
                coverage.missing.push(reached..fresh.min(expected));
            }
            if range.start < reached {
                coverage.repeated.push(range.start..range.end.min(reached));
            }
            if range.end > expected.max(fresh) {
                coverage.repeated.push(fresh.max(expected)..range.end);
            }
            coverage.covered += range.end.min(expected).saturating_sub(fresh);
            reached = reached.max(range.end);
        }
        if reached < expected {
            coverage.missing.push(reached..expected);
        }
        coverage
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Coverage by counting each position.
    fn counted(expected: u64, ranges: &[Range<u64>]) -> (u64, u64, u64) {
        let times = |position: u64| ranges.iter().filter(|range| range.contains(&position)).count() as u64;
        let (mut covered, mut missing, mut repeated) = (0, 0, 0);
        for position in 0..40 {
            let times = times(position);
            match position < expected {
                true if times == 0 => missing += 1,
                true => (covered, repeated) = (covered + 1, repeated + times - 1),
                false => repeated += times,
            }
        }
        (covered, missing, repeated)
    }

    #[test]
    fn it_agrees_with_counting_every_position() {
        let mut word = 1u64;
        let mut draw = |below: u64| {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (word >> 33) % below
        };
        for _ in 0..2_000 {
            let expected = draw(30);
            let ranges: Vec<_> = (0..draw(7))
                .map(|_| {
                    let begin = draw(32);
                    begin..begin + draw(8)
                })
                .collect();
            let coverage = Coverage::compute(expected, ranges.clone());
            let size = |ranges: &[Range<u64>]| ranges.iter().map(|r| r.end - r.start).sum::<u64>();
            let found = (coverage.covered, size(&coverage.missing), size(&coverage.repeated));
            assert_eq!(found, counted(expected, &ranges), "{expected} {ranges:?} {coverage:?}");
        }
    }
}
