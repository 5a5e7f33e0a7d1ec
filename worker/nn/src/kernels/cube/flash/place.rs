//! Which rows a cube has, where they lie, and what they see.

use cubecl::prelude::*;

use super::tile::{OWN, Rows};

/// Tokens and heads; query heads of a key/value head; and what scores are multiplied with.
#[derive(CubeType, CubeLaunch)]
pub struct Sizes {
    pub queries: u32,
    pub keys: u32,
    pub heads: u32,
    pub group: u32,
    pub scale: f32,
}

/// How an input lies, in vectors.
#[derive(CubeType, CubeLaunch)]
pub struct Strides {
    of_batch: u32,
    of_token: u32,
    of_head: u32,
}

/// Tokens of a head of a batch row: from `first` on, and none from `end` on.
#[derive(CubeType, Clone, Copy)]
pub struct Tokens {
    pub batch: usize,
    pub head: usize,
    pub first: usize,
    pub end: usize,
}

#[cube]
impl Strides {
    /// Where these tokens lie.
    pub fn rows(&self, of: Tokens) -> Rows {
        let from = of.batch * self.of_batch as usize + of.head * self.of_head as usize;
        Rows { from, stride: self.of_token as usize, first: of.first, end: of.end }
    }
}

/// The rows that a cube's results are for: [`OWN`] from `first` on, of a head of a batch row.
#[derive(CubeType, Clone, Copy)]
pub struct CubeRows {
    pub batch: usize,
    pub head: usize,
    pub first: usize,
    /// Heads of a batch row.
    pub heads: usize,
}

#[cube]
impl CubeRows {
    /// The rows of a cube by its number, row after row and head after head. Cubes start in that order: where
    /// the last rows meet most keys, they come first.
    pub fn of(number: usize, rows: usize, heads: usize, #[comptime] last_first: bool) -> Self {
        let tiles = rows.div_ceil(OWN);
        let mut tile = number % tiles;
        if last_first {
            tile = tiles - 1 - tile;
        }
        let (head, batch) = (number / tiles % heads, number / (tiles * heads));
        CubeRows { batch, head, first: tile * OWN, heads }
    }

    /// The tokens of these rows, of so many.
    pub fn tokens(&self, end: usize) -> Tokens {
        Tokens { batch: self.batch, head: self.head, first: self.first, end }
    }
}

/// The first key that any of a cube's queries sees, and the one after the last.
#[cube]
pub fn keys_seen(
    bounds: &Array<i32>,
    cube: &CubeRows,
    sizes: &Sizes,
    #[comptime] masked: bool,
    #[comptime] causal: bool,
) -> (usize, usize) {
    let keys = sizes.keys as usize;
    let mut start = 0usize;
    let mut end = keys;
    if masked {
        start = usize::cast_from(bounds[2 * cube.batch]);
        end = min(usize::cast_from(bounds[2 * cube.batch + 1]), keys);
    }
    let last_query = min(cube.first + OWN, sizes.queries as usize) - 1;
    (start, last_key(end, last_query, causal))
}

/// The key after the last that a query sees of those before `end`.
#[cube]
pub fn last_key(end: usize, query: usize, #[comptime] causal: bool) -> usize {
    let mut last = end;
    if causal {
        last = min(end, query + 1);
    }
    last
}
