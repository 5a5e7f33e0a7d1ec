//! Which keys a query sees, as intervals, and how queries are cut into blocks.
//!
//! Under every mask a query sees one interval of keys. Consecutive queries are put into blocks of at most
//! [`QUERY_BLOCK`]; a block computes scores against the union of its intervals only, so a causal mask costs
//! half and a windowed one a fraction. Queries that see nothing (left padding) have blocks of their own, so
//! that a row's blocks begin with its first token however far it is padded. Blocks whose keys are shared form
//! a [`Component`]; components touch disjoint keys, which is what lets the backward pass run them at once and
//! still add up every key's gradient in one order.
//!
//! What it does not do: look at any value.

use std::ops::Range;

use crate::kernels::AttentionMask;

/// Queries per block. With 256 keys the block's scores are 64 KiB: they stay in the second-level cache
/// between the product that makes them and the one that uses them, and the products are still large enough to
/// run near their peak rate.
pub const QUERY_BLOCK: usize = 64;

/// Consecutive queries and the union of the keys they see (possibly none).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueryBlock {
    /// The queries.
    pub queries: Range<usize>,
    /// The keys.
    pub keys: Range<usize>,
}

/// Consecutive blocks, and keys that no block of another component sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Component {
    /// The blocks, in order of their queries.
    pub blocks: Range<usize>,
    /// The keys. The components of one batch row cover all keys.
    pub keys: Range<usize>,
}

/// The keys that query `q` of batch row `b` sees, of `keys` in all.
pub fn span(mask: &AttentionMask, b: usize, q: usize, keys: usize) -> Range<usize> {
    let clipped = |start: u32, end: usize| {
        let end = end.min(keys);
        (start as usize).min(end)..end
    };
    match mask {
        AttentionMask::Full => 0..keys,
        AttentionMask::Keys(ranges) => clipped(ranges[b].start, ranges[b].end as usize),
        AttentionMask::Causal(ranges) => clipped(ranges[b].start, (ranges[b].end as usize).min(q + 1)),
        AttentionMask::Segments(ends) => {
            let (start, end) = segment(ends, q, keys);
            clipped(start, end)
        }
        AttentionMask::CausalSegments(ends) => {
            let (start, end) = segment(ends, q, keys);
            clipped(start, end.min(q + 1))
        }
    }
}

/// First key of a query's segment, and the one after its last.
fn segment(ends: &[u32], q: usize, keys: usize) -> (u32, usize) {
    let segment = ends.partition_point(|&end| end as usize <= q);
    let start = if segment == 0 { 0 } else { ends[segment - 1] };
    (start, ends.get(segment).map_or(keys, |&end| end as usize))
}

/// The blocks of batch row `b`.
pub fn blocks(mask: &AttentionMask, b: usize, queries: usize, keys: usize) -> Vec<QueryBlock> {
    let mut blocks: Vec<QueryBlock> = Vec::new();
    for q in 0..queries {
        let span = span(mask, b, q, keys);
        match blocks.last_mut() {
            Some(block)
                if block.queries.len() < QUERY_BLOCK
                    && block.keys.is_empty() == span.is_empty()
                    && joins(&block.keys, &span) =>
            {
                block.queries.end = q + 1;
                block.keys = union(&block.keys, &span);
            }
            _ => blocks.push(QueryBlock { queries: q..q + 1, keys: span }),
        }
    }
    blocks
}

/// The components of the blocks of one batch row.
pub fn components(blocks: &[QueryBlock], keys: usize) -> Vec<Component> {
    let mut components: Vec<Component> = Vec::new();
    let mut seen = 0..0;
    for (i, block) in blocks.iter().enumerate() {
        match components.last_mut() {
            Some(component) if joins(&seen, &block.keys) => {
                component.blocks.end = i + 1;
                seen = union(&seen, &block.keys);
                component.keys.end = seen.end.max(component.keys.end);
            }
            _ => {
                let start = components.last().map_or(0, |component| component.keys.end);
                components.push(Component { blocks: i..i + 1, keys: start..block.keys.end.max(start) });
                seen = block.keys.clone();
            }
        }
    }
    match components.last_mut() {
        Some(last) => last.keys.end = keys,
        None => components.push(Component { blocks: 0..0, keys: 0..keys }),
    }
    components
}

fn joins(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.is_empty() || b.is_empty() || (b.start < a.end && a.start < b.end)
}

fn union(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    match (a.is_empty(), b.is_empty()) {
        (true, _) => b.clone(),
        (_, true) => a.clone(),
        _ => a.start.min(b.start)..a.end.max(b.end),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::reference::admits;

    fn masks() -> Vec<AttentionMask> {
        vec![
            AttentionMask::Full,
            AttentionMask::Keys([3..140, 0..0].into()),
            AttentionMask::Causal([0..150, 20..150].into()),
            AttentionMask::Causal([5..5, 0..60].into()),
            AttentionMask::Segments([0, 64, 70, 70, 150].into()),
            AttentionMask::Segments([10, 20].into()),
            AttentionMask::CausalSegments([0, 64, 70, 70, 150].into()),
            AttentionMask::CausalSegments([10, 20].into()),
        ]
    }

    #[test]
    fn spans_say_what_the_mask_says() {
        for mask in masks() {
            for (b, q, k) in (0..2).flat_map(|b| (0..150).flat_map(move |q| (0..150).map(move |k| (b, q, k))))
            {
                assert_eq!(
                    span(&mask, b, q, 150).contains(&k),
                    admits(&mask, b, q, k),
                    "{mask:?} {b} {q} {k}"
                );
            }
        }
    }

    #[test]
    fn blocks_cover_queries_and_components_cut_the_keys() {
        for (mask, b) in masks().into_iter().flat_map(|mask| [(mask.clone(), 0), (mask, 1)]) {
            let blocks = blocks(&mask, b, 150, 150);
            assert_eq!(
                blocks.iter().flat_map(|block| block.queries.clone()).collect::<Vec<_>>(),
                (0..150).collect::<Vec<_>>()
            );
            let components = components(&blocks, 150);
            assert_eq!(
                components.iter().flat_map(|c| c.keys.clone()).collect::<Vec<_>>(),
                (0..150).collect::<Vec<_>>()
            );
            assert_eq!(
                components.iter().flat_map(|c| c.blocks.clone()).collect::<Vec<_>>(),
                (0..blocks.len()).collect::<Vec<_>>()
            );
            for component in &components {
                for block in blocks[component.blocks.clone()].iter().filter(|block| !block.keys.is_empty()) {
                    assert!(
                        component.keys.start <= block.keys.start && block.keys.end <= component.keys.end,
                        "{mask:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn padding_moves_blocks_and_changes_none() {
        let of = |padding: usize| {
            let mask = AttentionMask::Causal([padding as u32..padding as u32 + 150].into());
            let blocks = blocks(&mask, 0, padding + 150, padding + 150);
            let seeing = blocks.into_iter().filter(|block| !block.keys.is_empty());
            let back = |range: Range<usize>| range.start - padding..range.end - padding;
            seeing
                .map(|block| QueryBlock { queries: back(block.queries), keys: back(block.keys) })
                .collect::<Vec<_>>()
        };
        assert!((1..130).all(|padding| of(padding) == of(0)));
    }

    #[test]
    fn a_causal_segment_is_cut_as_if_it_were_alone() {
        let mask = AttentionMask::CausalSegments([0, 37, 37, 150].into());
        let found = blocks(&mask, 0, 150, 150);
        let alone = blocks(&AttentionMask::Causal([0..113].into()), 0, 113, 113);
        let moved = |range: Range<usize>| range.start + 37..range.end + 37;
        let moved = alone
            .into_iter()
            .map(|QueryBlock { queries, keys }| QueryBlock { queries: moved(queries), keys: moved(keys) });
        assert_eq!(found[1..], moved.collect::<Vec<_>>()[..]);
        assert_eq!(
            components(&found, 150).iter().map(|c| c.keys.clone()).collect::<Vec<_>>(),
            [0..37, 37..150]
        );
    }

    #[test]
    fn windows_become_components_of_their_own() {
        let mask = AttentionMask::Segments([0, 64, 128, 150].into());
        let blocks = blocks(&mask, 0, 150, 150);
        assert_eq!(blocks.len(), 3);
        assert_eq!(components(&blocks, 150).len(), 3);
    }
}
