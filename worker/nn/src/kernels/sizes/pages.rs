//! What an allocator that divides large pages reserves for a pass: cubecl's, on a GPU.
//!
//! ```text
//! GPU of M bytes   pages of M/4, M/16, M/64 .. down to some 8 MB, each for what is small beside it
//! a tensor         the smallest pages that take it: the first free piece in the first page that has one, and
//!                  what is left of the piece stays free; else one more page
//! free pieces      are one again with their neighbours when room is looked for
//! ```
//!
//! Pages are never given back within a run, so what is reserved after a pass is what it needed at its worst,
//! and what it cut up meanwhile. What this file does not do: what stays for a whole run, which the allocator
//! is told to allocate to its size.

use std::collections::HashMap;

use crate::kernels::blockwise::TILE;

/// To a multiple of this.
const ALIGNMENT: u64 = 512;
/// Page sizes are divided by four while they are at least this.
const DIVIDED: u64 = 32 << 20;

/// Something that happened to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// So many bytes were taken, under this name.
    Taken(u64, u64),
    /// What has this name was given back.
    Released(u64),
}

/// What a pass took and gave back, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allocations(pub Vec<Allocation>);

impl Allocations {
    /// What a larger pass took and gave back: each of its tensors on the line through those of two smaller
    /// ones; of passes that are not alike, in proportion to the larger one's. What fills a tile of
    /// attention's scores stays as it is: there are more of them.
    pub fn beyond(
        one: &Self,
        other: &Self,
        line: impl Fn(u64, u64) -> u64,
        proportion: impl Fn(u64) -> u64,
    ) -> Self {
        let alike = one.0.len() == other.0.len();
        let fills_a_tile = |bytes: u64| bytes <= TILE as u64 && bytes > TILE as u64 / 10 * 9;
        let larger = |(number, allocation): (usize, &Allocation)| match (one.0.get(number), *allocation) {
            (_, Allocation::Released(name)) => Allocation::Released(name),
            (_, Allocation::Taken(name, bytes)) if fills_a_tile(bytes) => Allocation::Taken(name, bytes),
            (Some(Allocation::Taken(_, before)), Allocation::Taken(name, bytes)) if alike => {
                Allocation::Taken(name, line(*before, bytes))
            }
            (_, Allocation::Taken(name, bytes)) => Allocation::Taken(name, proportion(bytes)),
        };
        Self(other.0.iter().enumerate().map(larger).collect())
    }

    /// Bytes of the pages that this needs on a GPU of so much memory.
    pub fn reserved(&self, gpu: u64) -> u64 {
        let mut pools = pools(gpu);
        let mut places: HashMap<u64, usize> = HashMap::new();
        for event in &self.0 {
            match *event {
                Allocation::Taken(name, bytes) if bytes > 0 => {
                    let Some(place) = pools.iter().position(|pool| pool.accepts(bytes)) else { continue };
                    pools[place].allocate(name, bytes);
                    places.insert(name, place);
                }
                Allocation::Taken(..) => {}
                Allocation::Released(name) => {
                    if let Some(place) = places.remove(&name) {
                        pools[place].release(name);
                    }
                }
            }
        }
        pools.iter().map(|pool| pool.page * pool.pages.len() as u64).sum()
    }
}

/// Pages of one size.
struct Pool {
    page: u64,
    most: u64,
    pages: Vec<Vec<PagePart>>,
}

/// Part of a page.
#[derive(Clone, Copy)]
struct PagePart {
    bytes: u64,
    of: Option<u64>,
}

/// All pools of a GPU, small pages first.
fn pools(gpu: u64) -> Vec<Pool> {
    let largest = gpu / 4;
    let (mut sizes, mut page, mut divided) = (Vec::new(), largest, 1);
    while page >= DIVIDED {
        page = (page / 4).next_multiple_of(ALIGNMENT);
        sizes.push((page, page >> divided));
        divided += 1;
    }
    sizes.reverse();
    let whole = largest / ALIGNMENT * ALIGNMENT;
    sizes.push((whole, whole));
    sizes.into_iter().map(|(page, most)| Pool { page, most, pages: Vec::new() }).collect()
}

impl Pool {
    /// Small beside a page, or nearly all of it.
    fn accepts(&self, bytes: u64) -> bool {
        bytes <= self.most || self.page.checked_sub(bytes).is_some_and(|left| left * 5 < self.page)
    }

    fn allocate(&mut self, name: u64, bytes: u64) {
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        for page in &mut self.pages {
            join_free(page);
            if cut(page, name, bytes) {
                return;
            }
        }
        let mut page = vec![PagePart { bytes: self.page, of: None }];
        cut(&mut page, name, bytes);
        self.pages.push(page);
    }

    fn release(&mut self, name: u64) {
        let pieces = self.pages.iter_mut().flatten();
        pieces.filter(|piece| piece.of == Some(name)).for_each(|piece| piece.of = None);
    }
}

/// Takes the first free piece that is large enough; says whether there is one.
fn cut(page: &mut Vec<PagePart>, name: u64, bytes: u64) -> bool {
    let fits = |piece: &PagePart| piece.of.is_none() && piece.bytes >= bytes;
    let Some(at) = page.iter().position(fits) else { return false };
    let left = page[at].bytes - bytes;
    page[at] = PagePart { bytes, of: Some(name) };
    if left > 0 {
        page.insert(at + 1, PagePart { bytes: left, of: None });
    }
    true
}

/// Makes one of free neighbours.
fn join_free(page: &mut Vec<PagePart>) {
    page.dedup_by(|next, piece| {
        let free = next.of.is_none() && piece.of.is_none();
        if free {
            piece.bytes += next.bytes;
        }
        free
    });
}

#[cfg(test)]
mod tests {
    use super::{Allocation::*, *};

    /// Pages of 16, 64 and 256 MiB.
    const GPU: u64 = 1 << 30;

    #[test]
    fn pages_are_those_of_the_allocator() {
        let sizes: Vec<_> = pools(GPU).iter().map(|pool| (pool.page >> 20, pool.most >> 10)).collect();
        assert_eq!(sizes, [(16, 4 << 10), (64, 32 << 10), (256, 256 << 10)]);
    }

    #[test]
    fn what_is_given_back_is_taken_again_and_pages_stay() {
        let (small, page) = (3 << 20, 16 << 20);
        let taken = |names: std::ops::Range<u64>| names.map(|name| Taken(name, small)).collect::<Vec<_>>();
        assert_eq!(Allocations(taken(0..5)).reserved(GPU), page);
        assert_eq!(Allocations(taken(0..6)).reserved(GPU), 2 * page, "15 of 16 MiB leave no room for 3");
        let again = [taken(0..5), vec![Released(1)], taken(5..6), (0..6).map(Released).collect()].concat();
        assert_eq!(Allocations(again).reserved(GPU), page);
        // Free neighbours are one piece; pieces apart are not.
        let between = |released: [u64; 2]| {
            let more = released.map(Released).into_iter().chain([Taken(9, 4 << 20)]);
            Allocations(taken(0..5).into_iter().chain(more).collect()).reserved(GPU)
        };
        assert_eq!([between([1, 2]), between([1, 3])], [page, 2 * page]);
    }

    #[test]
    fn what_nearly_fills_a_page_gets_one_and_the_rest_a_larger_one() {
        let of = |bytes: u64| Allocations(vec![Taken(0, bytes)]).reserved(GPU) >> 20;
        assert_eq!([of(1), of(4 << 20), of(5 << 20), of(14 << 20)], [16, 16, 64, 16]);
        assert_eq!([of(60 << 20), of(200 << 20)], [64, 256]);
    }

    #[test]
    fn a_larger_pass_is_on_the_line_through_two_smaller_ones() {
        let of = |bytes| Allocations(vec![Taken(7, bytes), Taken(8, 100), Released(7)]);
        let line = |from: u64, to: u64| to + (to - from) * 2;
        let beyond = |one: &Allocations, other| Allocations::beyond(one, &other, line, |bytes| 2 * bytes);
        assert_eq!(beyond(&of(10), of(20)), of(40));
        let unlike = Allocations(vec![Taken(7, 40), Taken(8, 200), Released(7)]);
        assert_eq!(beyond(&Allocations::default(), of(20)), unlike, "in proportion");
        assert_eq!(beyond(&of(10), of(TILE as u64)), of(TILE as u64), "a tile stays a tile");
    }
}
