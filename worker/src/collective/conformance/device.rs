//! Buffers in a device's memory: they go every way that the optimizer sends them, wherever that is.
//!
//! On Flex for every implementation, where all of them work on a copy; on a GPU from the crate that knows
//! one, where a transport works on the buffer itself. Lengths are such that no world of several divides all
//! of them: chunks that NCCL takes for equal are not.

use std::ops::Range;

use burn::backend::{Flex, flex::FlexDevice};
use coxswain_proto::ids::Rank;

use super::{
    Violation, hold,
    values::{CheckResult, of_all, place, reduced},
};
use crate::collective::{Collective, Reduce, chunk};
use coxswain_nn::kernels::flat::{Flat, Halves, OnDevice};

const LENGTHS: [usize; 5] = [1, 3, 1027, 131_072, 500_009];

pub(super) fn on_flex(comm: &mut dyn Collective) -> CheckResult {
    on_device::<OnDevice<Flex>>(comm, &FlexDevice)
}

/// One rank's part of a [`Behaviour`](super::Behaviour) with buffers of this kind.
pub fn on_device<F: Flat>(comm: &mut dyn Collective, at: &F::Place) -> Result<bool, Violation> {
    for len in LENGTHS {
        as_floats::<F>(comm, at, len)?;
        as_halves::<F>(comm, at, len)?;
    }
    Ok(true)
}

fn same<F: Flat>(flat: &F, due: &[f32], range: Range<usize>) -> bool {
    flat.read(range.clone())[..] == due[range]
}

fn as_floats<F: Flat>(comm: &mut dyn Collective, at: &F::Place, len: usize) -> Result<(), Violation> {
    let (rank, world) = place(comm);
    // As far as may be.
    let distance = world.max(2) - 1;
    let [own, before] = [rank, (rank + world - distance) % world].map(|owner| chunk(len, world, owner));
    let all = of_all(world, len);
    let sum = reduced(&all, |a, b| a + b);
    let mut flat = F::of(at, all[rank].clone());
    comm.all_reduce(flat.lend().into(), Reduce::Max)?;
    hold!(same(&flat, &reduced(&all, f32::max), 0..len), "maximum of {len}");
    let mut flat = F::of(at, all[rank].clone());
    comm.reduce_scatter_in_place(flat.lend().into(), Reduce::Sum)?;
    hold!(same(&flat, &sum, own.clone()), "reduce-scatter of {len}");
    comm.shift_in_place(flat.lend().into(), distance)?;
    hold!(same(&flat, &sum, own.clone()) && same(&flat, &sum, before), "shift of {len}");
    // What the others are about to overwrite.
    flat.clear(0..own.start);
    flat.clear(own.end..len);
    comm.all_gather_in_place(flat.lend().into())?;
    hold!(same(&flat, &sum, 0..len), "all-gather of {len}");
    let root = len % world;
    let mut flat = F::of(at, all[rank].clone());
    comm.broadcast(flat.lend().into(), Rank(root as u32))?;
    hold!(same(&flat, &all[root], 0..len), "broadcast of {len}");
    Ok(())
}

fn as_halves<F: Flat>(comm: &mut dyn Collective, at: &F::Place, len: usize) -> Result<(), Violation> {
    let (rank, world) = place(comm);
    let [own, before] = [rank, (rank + world - 1) % world].map(|owner| chunk(len, world, owner));
    // Small enough that sums of several are exact in 8 bits.
    let all: Vec<Vec<f32>> =
        of_all(world, len).iter().map(|values| values.iter().map(|value| value % 16.0).collect()).collect();
    let sum = reduced(&all, |a, b| a + b);
    let mut flat = F::of(at, all[rank].clone());
    let mut halves = F::Halves::default();
    flat.narrow(&mut halves);
    comm.reduce_scatter_in_place(halves.lend().into(), Reduce::Sum)?;
    flat.widen(&halves, own.clone());
    hold!(same(&flat, &sum, own), "bfloat16 reduce-scatter of {len}");
    comm.shift_in_place(halves.lend().into(), 1)?;
    flat.widen(&halves, before.clone());
    hold!(same(&flat, &sum, before), "bfloat16 shift of {len}");
    Ok(())
}
