//! Attention in one kernel forward and two backward, in bfloat16 with sums of float32: FlashAttention (Dao et
//! al., arXiv 2205.14135 and 2307.08691), on `mma.sync` of 16 x 8 x 16.
//!
//! ```text
//! forward    a cube has 64 queries of a head; keys and values pass through its shared memory, 32 at a time
//! dq         likewise; weights are made again from `lse`, and `delta` of each query is left
//! dk, dv     a cube has 64 keys of a key/value head; the queries of all its heads pass through
//! ```
//!
//! A plane multiplies 16 of the cube's rows. Scores stay in its registers: those that hold one product's sums
//! are, once rounded, the next one's left operand. Inputs are read where they lie, and results lie by token.
//! Nothing is added up by two cubes: results repeat to the bit.
//!
//! What this module does not do: models of float32 and float16, other widths of heads than
//! [`may_fuse`] says, and devices without these instructions or the shared memory. [`fuses`] is false there,
//! and `blockwise` attends in tiles. Attention with something added to its scores is products, too.

mod backward;
mod forward;
mod place;
mod tile;

use burn::tensor::{DType, Tensor, backend::Backend};
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::{
    features::MmaConfig,
    ir::{ElemType, FloatKind, StorageType},
    prelude::*,
};
use half::bf16;

use self::{
    backward::PART,
    place::{SizesLaunch, Strides, StridesLaunch},
    tile::{Input, OTHERS, OWN, PIECE, UNITS},
};
use super::launch::{elements, empty, primitive};
use crate::kernels::attention_ops::may_fuse;

/// What attention reads, all of float32 and each by its strides.
pub struct AttentionInputs<R: CubeRuntime> {
    /// Queries, `[b, s, heads, k]`.
    pub q_bshk: CubeTensor<R>,
    /// Keys, `[b, t, kv_heads, k]`.
    pub k_bshk: CubeTensor<R>,
    /// Values, `[b, t, kv_heads, k]`.
    pub v_bshk: CubeTensor<R>,
    /// The first key that each batch row sees, and the one after its last, `[2 b]`; all of them without.
    pub bounds: Option<CubeTensor<R>>,
    /// Whether a query sees no key after itself.
    pub causal: bool,
    /// What scores are multiplied with.
    pub scale: f64,
}

/// What a backward pass starts from.
pub struct AttentionPull<R: CubeRuntime> {
    /// The gradient of the output, `[b, s, heads, k]`, by its strides.
    pub dout_bshk: CubeTensor<R>,
    /// The output, likewise.
    pub out_bshk: CubeTensor<R>,
    /// The logarithm of each query's sum of exponentials, `[b, s, heads]`.
    pub lse_bsh: CubeTensor<R>,
}

/// Whether these kernels attend with such queries.
pub fn fuses<B, R>(q_bshk: &Tensor<B, 4>) -> bool
where
    B: Backend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    let [_, _, _, dim] = q_bshk.dims();
    let client = primitive(q_bshk.clone()).client;
    let properties = client.properties();
    let (hardware, products) = (&properties.hardware, &properties.features.matmul);
    let float = |kind| StorageType::Scalar(ElemType::Float(kind));
    let (half, sums) = (float(FloatKind::BF16), float(FloatKind::F32));
    let instruction = MmaConfig { a_type: half, b_type: half, cd_type: sums, m: 16, n: 8, k: 16 };
    // Of heads of 256 it is all that GPUs of compute capability 8.6 and 8.9 have.
    let tiles = 2 * size_of::<bf16>() * (OWN + OTHERS) * (dim + PIECE);
    may_fuse(dim)
        && products.mma.contains(&instruction)
        && products.ldmatrix.contains(&half)
        && [hardware.plane_size_min, hardware.plane_size_max] == [OTHERS as u32; 2]
        && hardware.max_shared_memory_size >= tiles
}

/// The output, `[b, s, heads, k]`, and the logarithm of each query's sum of exponentials, `[b, s, heads]`.
pub fn attention<R: CubeRuntime>(attending: AttentionInputs<R>) -> [CubeTensor<R>; 2] {
    let [batch, queries, heads, dim] = attending.q_bshk.meta.shape().dims();
    let out = empty(&attending.q_bshk, [batch, queries, heads, dim].into(), DType::F32);
    let lse = empty(&attending.q_bshk, [batch, queries, heads].into(), DType::F32);
    let inputs = [&attending.q_bshk, &attending.k_bshk, &attending.v_bshk].map(in_vectors);
    let (arrays, strides) = arguments(&inputs);
    forward::attend::launch::<R>(
        &out.client,
        cubes(queries.div_ceil(OWN) * heads * batch),
        CubeDim::new_1d(UNITS as u32),
        arrays,
        out.clone().into_array_arg(),
        lse.clone().into_array_arg(),
        attending.bounds_or(&lse).into_array_arg(),
        attending.sizes(),
        strides,
        dim,
        attending.bounds.is_some(),
        attending.causal,
    );
    [out, lse]
}

/// The gradients of queries, keys and values.
pub fn gradients<R: CubeRuntime>(
    attending: AttentionInputs<R>,
    pull: AttentionPull<R>,
) -> [CubeTensor<R>; 3] {
    let [batch, queries, heads, dim] = attending.q_bshk.meta.shape().dims();
    let [_, keys, kv_heads, _] = attending.k_bshk.meta.shape().dims();
    let AttentionPull { dout_bshk, out_bshk, lse_bsh } = pull;
    let inputs =
        [&attending.q_bshk, &attending.k_bshk, &attending.v_bshk, &dout_bshk, &out_bshk].map(in_vectors);
    let like = |x: &CubeTensor<R>| empty(x, x.meta.shape().clone(), DType::F32);
    let [dq, dk, dv] = [&inputs[0], &inputs[1], &inputs[2]].map(like);
    let (delta_bsh, masked) = (like(&lse_bsh), attending.bounds.is_some());
    let (arrays, strides) = arguments(&inputs);
    backward::query_gradients::launch::<R>(
        &dq.client,
        cubes(queries.div_ceil(OWN) * heads * batch),
        CubeDim::new_1d(UNITS as u32),
        arrays,
        dq.clone().into_array_arg(),
        lse_bsh.clone().into_array_arg(),
        delta_bsh.clone().into_array_arg(),
        attending.bounds_or(&lse_bsh).into_array_arg(),
        attending.sizes(),
        strides,
        dim,
        masked,
        attending.causal,
    );
    let (arrays, strides) = arguments(&inputs[..4]);
    backward::key_gradients::launch::<R>(
        &dk.client,
        cubes(keys.div_ceil(OWN) * kv_heads * batch * dim.div_ceil(PART)),
        CubeDim::new_1d(UNITS as u32),
        arrays,
        dk.clone().into_array_arg(),
        dv.clone().into_array_arg(),
        lse_bsh.clone().into_array_arg(),
        delta_bsh.into_array_arg(),
        attending.bounds_or(&lse_bsh).into_array_arg(),
        attending.sizes(),
        strides,
        dim,
        masked,
        attending.causal,
    );
    [dq, dk, dv]
}

impl<R: CubeRuntime> AttentionInputs<R> {
    /// What is absent is never read; of another type it would be a kernel of its own.
    fn bounds_or(&self, absent: &CubeTensor<R>) -> CubeTensor<R> {
        self.bounds.clone().unwrap_or_else(|| absent.clone())
    }

    fn sizes(&self) -> SizesLaunch<R> {
        let [_, queries, heads, _] = self.q_bshk.meta.shape().dims();
        let [_, keys, kv_heads, _] = self.k_bshk.meta.shape().dims();
        let group = heads / kv_heads;
        SizesLaunch::new(queries as u32, keys as u32, heads as u32, group as u32, self.scale as f32)
    }
}

/// Elements that are loaded at once.
const LOADED: usize = 4;

/// An input where it lies, if whole vectors can be loaded there, and else a copy.
fn in_vectors<R: CubeRuntime>(x: &CubeTensor<R>) -> CubeTensor<R> {
    let strides = x.meta.strides();
    let whole = strides[3] == 1 && strides[..3].iter().all(|stride| stride.is_multiple_of(LOADED));
    if whole { x.clone() } else { into_contiguous(x.clone()) }
}

/// Inputs for a kernel that goes by strides.
fn arguments<R: CubeRuntime>(inputs: &[CubeTensor<R>]) -> (SequenceArg<R, Input>, SequenceArg<R, Strides>) {
    let (mut arrays, mut strides) = (SequenceArg::new(), SequenceArg::new());
    for input in inputs {
        let [of_batch, of_token, of_head] =
            [0, 1, 2].map(|axis| (input.meta.strides()[axis] / LOADED) as u32);
        strides.push(StridesLaunch::new(of_batch, of_token, of_head));
        arrays.push(elements(input.clone()).into_array_arg());
    }
    (arrays, strides)
}

fn cubes(count: usize) -> CubeCount {
    CubeCount::Static(count as u32, 1, 1)
}
