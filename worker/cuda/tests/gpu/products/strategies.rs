//! The kernels of cubek's that Coxswain multiplies with, and for what. (cubek has others.)

use cubek::matmul::{
    components::tile::TileMatmulKind,
    launch::Strategy,
    routines::{
        BlueprintStrategy::Inferred, TileSizeSelection, double_buffering::DoubleBufferingArgs,
        double_unit::DoubleUnitSelectionArgs, ordered_double_buffering::OrderedSelectionArgs,
        simple::SimpleArgs, simple_unit::SimpleUnitSelectionArgs,
    },
};

use super::matrices::Number;

/// Where `kernels::cube::product` uses a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Use {
    /// By name, whatever the inner dimension.
    Any,
    /// If burn's autotuner chooses it, which is asked where the inner dimension is a multiple of 256, or, of
    /// vectors, of 512.
    Tuned,
    /// If burn's autotuner chooses it, and only for vectors.
    TunedForVectors,
}

pub struct Kernel {
    pub name: String,
    pub strategy: Strategy,
    pub usage: Use,
    /// Multiplies float32 as tf32.
    rounds: bool,
}

impl Kernel {
    fn new(usage: Use, rounds: bool, strategy: Strategy) -> Self {
        let name = strategy.to_string().replace("matmul_", "");
        Self { name, strategy, usage, rounds }
    }

    /// Tolerance of one element, in units of the root of the inner dimension.
    pub fn tolerance(&self, number: Number) -> f64 {
        if self.rounds && number == Number::Float { 4e-3 } else { 1e-4 }
    }
}

pub fn kernels() -> Vec<Kernel> {
    let mut all = plain();
    for tile in [TileMatmulKind::Cmma, TileMatmulKind::Mma] {
        all.extend(single_buffered(tile));
        all.extend(double_buffered(tile));
    }
    all
}

/// One of two: with opaque fragments, or with registers laid out by cubek.
fn either<T>(tile: TileMatmulKind, cmma: fn(T) -> Strategy, mma: fn(T) -> Strategy, args: T) -> Strategy {
    if tile == TileMatmulKind::Cmma { cmma(args) } else { mma(args) }
}

/// Without tensor cores.
fn plain() -> Vec<Kernel> {
    let mut all = vec![Kernel::new(Use::Any, false, Strategy::Naive)];
    for tile_size in [TileSizeSelection::MaxTileSize, TileSizeSelection::MinTileSize] {
        let single = Strategy::SimpleUnit(Inferred(SimpleUnitSelectionArgs { tile_size }));
        let double = Strategy::DoubleUnit(Inferred(DoubleUnitSelectionArgs { tile_size }));
        let by_name = matches!(tile_size, TileSizeSelection::MaxTileSize);
        all.push(Kernel::new(if by_name { Use::Any } else { Use::Tuned }, false, single));
        all.push(Kernel::new(Use::Tuned, false, double));
    }
    for strategy in [
        Strategy::SimpleVecMat(Inferred(().into())),
        Strategy::DoubleVecMat(Inferred(().into())),
        Strategy::GemvPlaneParallel(Inferred(Default::default())),
        Strategy::GemvUnitPerpendicular(Inferred(Default::default())),
    ] {
        all.push(Kernel::new(Use::TunedForVectors, false, strategy));
    }
    all
}

fn single_buffered(tile_matmul: TileMatmulKind) -> Vec<Kernel> {
    use Strategy as S;
    let mut all = Vec::new();
    for multi_rows in [false, true] {
        let args = SimpleArgs { multi_rows, tile_matmul };
        let cyclic = either(tile_matmul, S::SimpleCyclicCmma, S::SimpleCyclicMma, Inferred(args.clone()));
        let boxes = either(tile_matmul, S::SimpleTmaCmma, S::SimpleTmaMma, Inferred(args.clone()));
        all.push(Kernel::new(if multi_rows { Use::Any } else { Use::Tuned }, true, cyclic));
        all.push(Kernel::new(Use::Tuned, true, boxes));
    }
    all
}

fn double_buffered(tile_matmul: TileMatmulKind) -> Vec<Kernel> {
    use Strategy as S;
    let mut all = Vec::new();
    for row_count in [4, 8] {
        let args = OrderedSelectionArgs {
            partition_k: Some(2),
            row_count: Some(row_count),
            rows_per_plane: Some(2),
            tile_matmul,
        };
        let ordered = either(tile_matmul, S::OrderedDoubleCmma, S::OrderedDoubleMma, Inferred(args));
        all.push(Kernel::new(Use::Tuned, true, ordered));
    }
    for specialized in [false, true] {
        let args = DoubleBufferingArgs { specialized, tile_matmul };
        let cyclic = either(tile_matmul, S::DoubleCyclicCmma, S::DoubleCyclicMma, Inferred(args));
        all.push(Kernel::new(Use::Tuned, true, cyclic));
    }
    for strategy in [
        either(tile_matmul, S::SpecializedCyclicCmma, S::SpecializedCyclicMma, Inferred(().into())),
        either(tile_matmul, S::SpecializedTmaCmma, S::SpecializedTmaMma, Inferred(().into())),
    ] {
        all.push(Kernel::new(Use::Tuned, true, strategy));
    }
    all
}
