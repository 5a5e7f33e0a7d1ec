//! Kernels that are launched by name, and may fail when they are first used.
//!
//! A launch only says whether a kernel takes its arguments. That it cannot be compiled, loaded or started,
//! the device finds later, on a thread of its own, and tells the next one that waits for it. So the first use
//! of a kernel on matrices of a class is waited for, and what came of it is remembered: one that failed is
//! never launched again on matrices like these, and the next kernel takes its place.
//!
//! What it does not do: find a kernel that computes something else than it should, or outlive one that writes
//! where it must not. After that a GPU does nothing more for its process.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use burn::tensor::DType;
use burn_cubecl::{CubeRuntime, tensor::CubeTensor};
use cubecl::{
    client::ComputeClient,
    device::{Device, DeviceId},
    future::block_on,
};

use crate::memory::refusal::is_out_of_memory;

/// Sides that are at least this long are alike: no kernel has larger tiles.
const LONGEST: usize = 1024;
/// Bytes that the widest load takes: rows that begin at multiples of it are alike.
const WIDEST: usize = 16;
/// Characters of a failure that are logged; the source of the kernel comes behind them.
const TOLD: usize = 300;
/// Classes that are remembered; then all are forgotten, and tried again.
const MOST: usize = 4096;

/// What a kernel is tried on: matrices for which it is the same program, or nearly.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Class {
    device: DeviceId,
    sides: [Side; 3],
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Side {
    dtype: DType,
    /// Whether rows lie whole; otherwise columns do.
    rows: bool,
    /// The largest power of two up to [`WIDEST`] bytes that rows begin at.
    aligned: usize,
    /// Rows and columns, up to the next power of two.
    sizes: [usize; 2],
}

impl Side {
    fn from_tensor<R: CubeRuntime>(x: &CubeTensor<R>) -> Self {
        let (shape, strides) = (x.meta.shape(), x.meta.strides());
        let rank = shape.len();
        let rows = strides[rank - 1] == 1;
        let apart = if rows { strides[rank - 2] } else { strides[rank - 1] } * x.dtype.size();
        Self {
            dtype: x.dtype,
            rows,
            aligned: 1 << apart.trailing_zeros().min(WIDEST.trailing_zeros()),
            sizes: [rank - 2, rank - 1].map(|axis| shape[axis].next_power_of_two().min(LONGEST)),
        }
    }
}

impl Class {
    /// The class of a product's two sides and its result.
    pub fn from_sides<R: CubeRuntime>(sides: [&CubeTensor<R>; 3]) -> Self {
        Self { device: sides[0].device.to_id(), sides: sides.map(Side::from_tensor) }
    }
}

/// What came of each trial.
static TRIED: Mutex<Option<HashMap<(&'static str, Class), bool>>> = Mutex::new(None);

fn remembered(key: &(&'static str, Class)) -> Option<bool> {
    TRIED.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.get(key).copied()
}

fn remember(key: (&'static str, Class), works: bool) {
    let mut tried = TRIED.lock().unwrap_or_else(PoisonError::into_inner);
    let tried = tried.get_or_insert_default();
    if tried.len() >= MOST {
        tried.clear();
    }
    tried.insert(key, works);
}

/// Launches a kernel, and says whether it computes: false if it refuses its arguments, or has failed on such
/// matrices, now or before.
///
/// Panics if something that was launched earlier has failed: the first one that waits is told, and it is not
/// this kernel's failure.
pub fn launched<R: CubeRuntime>(
    client: &ComputeClient<R>,
    kernel: &'static str,
    class: &Class,
    launch: impl FnOnce() -> bool,
) -> bool {
    let key = (kernel, class.clone());
    match remembered(&key) {
        Some(works) => return works && launch(),
        None => {
            if let Err(why) = settled(client) {
                panic!("an earlier operation failed on the device: {why}");
            }
        }
    }
    if !launch() {
        return false;
    }
    let outcome = settled(client);
    match &outcome {
        // Exhausted memory is no kernel's fault, and another kernel would not help.
        Err(why) if is_out_of_memory(why) => panic!("{why}"),
        Err(why) => {
            let why: String = why.chars().take(TOLD).collect();
            tracing::warn!(kernel, ?class, %why, "a kernel failed on its first use; using another one");
        }
        Ok(()) => (),
    }
    remember(key, outcome.is_ok());
    outcome.is_ok()
}

/// Waits for all that the device was told, and takes what went wrong.
fn settled<R: CubeRuntime>(client: &ComputeClient<R>) -> Result<(), String> {
    block_on(client.sync()).map_err(|why| format!("{why:?}"))
}
