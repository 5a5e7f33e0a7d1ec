//! What operations leave in buffers, compared element by element, bit for bit.
//!
//! Values are whole numbers small enough that sums of any world here are exact in any order; only where the
//! order itself is looked at are they of all magnitudes.

use std::{sync::atomic::Ordering, thread, time::Duration};

use coxswain_proto::ids::Rank;
use half::bf16;

use super::{Violation, hold};
use crate::clock;
use crate::collective::{Buf, BufMut, Collective, CollectiveError, Cuts, Reduce, chunk};
use coxswain_nn::{
    params::{Grain, Group, Init, TrainableLayout},
    rng::{Key, Purpose},
};

pub(super) type CheckResult = Result<bool, Violation>;

/// Around every border of the implementations: nothing, less than a world, odd, small, one piece, many
/// pieces.
const LENGTHS: [usize; 8] = [0, 1, 3, 64, 1027, 9001, 131_072, 500_009];
/// How late one rank comes to a barrier.
const LATE: Duration = Duration::from_millis(1);
/// How long what others have sent may be on its way.
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) fn place(comm: &dyn Collective) -> (usize, usize) {
    (comm.rank().0 as usize, comm.world())
}

/// A rank's values: different on every rank.
fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|at| ((rank * 31 + at * 7) % 1009) as f32 - 500.0).collect()
}

/// Values small enough that sums of several are exact in 8 bits.
fn bfloats(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|value| bf16::from_f32(value % 16.0)).collect()
}

/// Values in need of more than 24 bits.
fn doubles(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value) * (1.0 + f64::from(2f32.powi(-30)))).collect()
}

/// Values of all magnitudes, so that the order of additions shows.
fn uneven(rank: usize, len: usize, seed: u64) -> Vec<f32> {
    let key = Key { seed, purpose: Purpose::FlowNoise, step: rank as u64, sample: 0, repeat: 0 };
    let mut draws = key.draws();
    (0..len).map(|_| (draws.uniform() - 0.5) * (draws.uniform() * 20.0).exp2()).collect()
}

/// The reduction of all ranks' values in the order `c + 1, c + 2, .., c` for chunk `c`.
pub(super) fn reduced<T: Copy>(all: &[Vec<T>], join: impl Fn(T, T) -> T) -> Vec<T> {
    let (world, len) = (all.len(), all[0].len());
    let mut out = all[0].clone();
    for owner in 0..world {
        for at in chunk(len, world, owner) {
            out[at] = (2..=world)
                .fold(all[(owner + 1) % world][at], |sum, step| join(sum, all[(owner + step) % world][at]));
        }
    }
    out
}

pub(super) fn of_all(world: usize, len: usize) -> Vec<Vec<f32>> {
    (0..world).map(|rank| values(rank, len)).collect()
}

pub(super) fn all_reduce(comm: &mut dyn Collective) -> CheckResult {
    let (rank, world) = place(comm);
    for len in LENGTHS {
        let all = of_all(world, len);
        let mut buffer = all[rank].clone();
        comm.all_reduce(BufMut::F32(&mut buffer), Reduce::Sum)?;
        hold!(buffer == reduced(&all, |a, b| a + b), "sum of {len}");
        buffer.copy_from_slice(&all[rank]);
        comm.all_reduce(BufMut::F32(&mut buffer), Reduce::Max)?;
        hold!(buffer == reduced(&all, f32::max), "maximum of {len}");
        let all: Vec<_> = all.iter().map(|values| doubles(values)).collect();
        let mut buffer = all[rank].clone();
        comm.all_reduce(BufMut::F64(&mut buffer), Reduce::Sum)?;
        hold!(buffer == reduced(&all, |a, b| a + b), "float64 sum of {len}");
    }
    Ok(true)
}

pub(super) fn order_of_additions(comm: &mut dyn Collective) -> CheckResult {
    let (rank, world) = place(comm);
    for len in LENGTHS {
        let all: Vec<_> = (0..world).map(|rank| uneven(rank, len, 1)).collect();
        let sum = reduced(&all, |a, b| a + b);
        let mut buffer = all[rank].clone();
        comm.all_reduce(BufMut::F32(&mut buffer), Reduce::Sum)?;
        hold!(buffer == sum, "all-reduce of {len}");
        buffer.copy_from_slice(&all[rank]);
        comm.reduce_scatter_in_place(BufMut::F32(&mut buffer), Reduce::Sum)?;
        let own = chunk(len, world, rank);
        hold!(buffer[own.clone()] == sum[own], "reduce-scatter of {len}");
        let rounded =
            |values: &Vec<f32>| values.iter().map(|value| bf16::from_f32(*value)).collect::<Vec<_>>();
        let halves: Vec<_> = all.iter().map(rounded).collect();
        let mut buffer = halves[rank].clone();
        comm.all_reduce(BufMut::Bf16(&mut buffer), Reduce::Sum)?;
        let sum = reduced(&halves, |a, b| bf16::from_f32(a.to_f32() + b.to_f32()));
        hold!(buffer == sum, "bfloat16 all-reduce of {len}");
        let all: Vec<_> = all.iter().map(|values| doubles(values)).collect();
        let mut buffer = all[rank].clone();
        comm.all_reduce(BufMut::F64(&mut buffer), Reduce::Sum)?;
        hold!(buffer == reduced(&all, |a, b| a + b), "float64 all-reduce of {len}");
    }
    Ok(true)
}

pub(super) fn reduce_scatter(comm: &mut dyn Collective) -> CheckResult {
    let (rank, world) = place(comm);
    for len in LENGTHS {
        let all = of_all(world, len * world);
        let own = len * rank..len * (rank + 1);
        let mut buffer = all[rank].clone();
        comm.reduce_scatter_in_place(BufMut::F32(&mut buffer), Reduce::Sum)?;
        hold!(buffer[own.clone()] == reduced(&all, |a, b| a + b)[own.clone()], "{len} of float32");
        let all: Vec<_> = all.iter().map(|values| doubles(values)).collect();
        let mut buffer = all[rank].clone();
        comm.reduce_scatter_in_place(BufMut::F64(&mut buffer), Reduce::Max)?;
        hold!(buffer[own.clone()] == reduced(&all, f64::max)[own], "{len} of float64");
    }
    Ok(true)
}

pub(super) fn all_gather(comm: &mut dyn Collective) -> CheckResult {
    let (rank, world) = place(comm);
    for len in LENGTHS {
        let all = of_all(world, len);
        let mut output = vec![f32::NAN; len * world];
        comm.all_gather(Buf::F32(&all[rank]), BufMut::F32(&mut output))?;
        hold!(output == all.concat(), "{len} of float32");
        let mut output = vec![f64::NAN; len * world];
        comm.all_gather(Buf::F64(&doubles(&all[rank])), BufMut::F64(&mut output))?;
        hold!(output == doubles(&all.concat()), "{len} of float64");
    }
    Ok(true)
}

/// Rank 0 keeps out of an all-gather until it sees all that the others have brought; a communicator may also
/// show nothing.
pub(super) fn ahead(comm: &mut dyn Collective) -> CheckResult {
    let (rank, world) = place(comm);
    let share = |rank: usize, round: usize| vec![rank as f64, round as f64];
    for round in 0..3 {
        if let Some(ahead) = comm.ahead(2 * world).filter(|_| rank == 0) {
            let deadline = clock::now() + PATIENCE;
            while ahead.shares().len() + 1 < world {
                hold!(clock::now() < deadline, "round {round}: only shares {:?} are visible", ahead.shares());
                thread::yield_now();
            }
            let others: Vec<_> =
                (1..world).rev().map(|rank| (Rank(rank as u32), share(rank, round))).collect();
            hold!(ahead.shares() == others, "round {round}: shares {:?} are visible", ahead.shares());
            let longer = comm.ahead(3 * world).map(|ahead| ahead.shares());
            hold!(longer.is_none_or(|seen| seen.is_empty()), "round {round}: another all-gather is visible");
        }
        let mut all = vec![f64::NAN; 2 * world];
        comm.all_gather(Buf::F64(&share(rank, round)), BufMut::F64(&mut all))?;
        let expected: Vec<f64> = (0..world).flat_map(|rank| share(rank, round)).collect();
        hold!(all == expected, "round {round}");
    }
    Ok(true)
}

pub(super) fn in_place(comm: &mut dyn Collective) -> CheckResult {
    let (rank, world) = place(comm);
    for cuts in LENGTHS.into_iter().flat_map(|len| [Cuts::equal(len, world), by_parameter(len, world)]) {
        let (len, own) = (cuts.len(), cuts.part(rank));
        let sum = reduced(&of_all(world, len), |a, b| a + b);
        let mut buffer = values(rank, len);
        comm.reduce_scatter_parts(BufMut::F32(&mut buffer), &cuts, Reduce::Sum)?;
        hold!(buffer[own.clone()] == sum[own.clone()], "reduce-scatter of {len}");
        for distance in 1..world {
            let mut buffer = buffer.clone();
            comm.shift_parts(BufMut::F32(&mut buffer), &cuts, distance)?;
            let before = cuts.part((rank + world - distance) % world);
            hold!(buffer[before.clone()] == sum[before], "shift of {len} by {distance}");
        }
        buffer[..own.start].fill(f32::NAN);
        buffer[own.end..].fill(f32::NAN);
        comm.all_gather_parts(BufMut::F32(&mut buffer), &cuts)?;
        hold!(buffer == sum, "all-gather of {len}");
    }
    Ok(true)
}

/// Parts of whole parameters, one of which is half of all, so that some ranks have nothing.
fn by_parameter(len: usize, world: usize) -> Cuts {
    let mut layout = TrainableLayout::default();
    for (number, len) in [len / 2, len / 5, len - len / 2 - len / 5].into_iter().enumerate() {
        layout.add(number.to_string(), &[len], Group::BASE, true, Init::Zeros);
    }
    Grain::Parameter.cuts(&layout, world)
}

pub(super) fn halves(comm: &mut dyn Collective) -> CheckResult {
    let (rank, world) = place(comm);
    let plus = |a: bf16, b: bf16| bf16::from_f32(a.to_f32() + b.to_f32());
    let nothing = bf16::from_f32(-1.0);
    for len in LENGTHS {
        let all: Vec<_> = of_all(world, len).iter().map(|values| bfloats(values)).collect();
        let sum = reduced(&all, plus);
        let mut buffer = all[rank].clone();
        comm.all_reduce(BufMut::Bf16(&mut buffer), Reduce::Sum)?;
        hold!(buffer == sum, "sum of {len}");
        buffer.copy_from_slice(&all[rank]);
        comm.reduce_scatter_in_place(BufMut::Bf16(&mut buffer), Reduce::Sum)?;
        let (own, before) = (chunk(len, world, rank), chunk(len, world, (rank + world - 1) % world));
        hold!(buffer[own.clone()] == sum[own], "reduce-scatter of {len}");
        comm.shift_in_place(BufMut::Bf16(&mut buffer), 1)?;
        hold!(buffer[before.clone()] == sum[before], "shift of {len}");
        comm.all_gather_in_place(BufMut::Bf16(&mut buffer))?;
        hold!(buffer == sum, "all-gather of {len}");
        let mut output = vec![nothing; len * world];
        comm.all_gather(Buf::Bf16(&all[rank]), BufMut::Bf16(&mut output))?;
        hold!(output == all.concat(), "all-gather of shards of {len}");
        comm.reduce_scatter_in_place(BufMut::Bf16(&mut output), Reduce::Max)?;
        let mut part = output[len * rank..len * (rank + 1)].to_vec();
        hold!(part == all[rank], "maximum of {len}");
        comm.broadcast(BufMut::Bf16(&mut part), Rank(0))?;
        hold!(part == all[0], "broadcast of {len}");
    }
    Ok(true)
}

pub(super) fn shift(comm: &mut dyn Collective) -> CheckResult {
    let (rank, world) = place(comm);
    for (len, distance) in LENGTHS.into_iter().flat_map(|len| (1..world.max(2)).map(move |by| (len, by))) {
        let [own, before] = [rank, (rank + world - distance) % world].map(|owner| chunk(len, world, owner));
        let mut buffer = vec![f32::NAN; len];
        buffer[own.clone()].copy_from_slice(&values(rank, len)[own.clone()]);
        comm.shift_in_place(BufMut::F32(&mut buffer), distance)?;
        let due = values((rank + world - distance) % world, len);
        hold!(buffer[before.clone()] == due[before], "shift of {len} by {distance}");
        hold!(buffer[own.clone()] == values(rank, len)[own], "shift of {len}: own chunk changed");
    }
    Ok(true)
}

pub(super) fn broadcast(comm: &mut dyn Collective) -> CheckResult {
    let (rank, world) = place(comm);
    for len in LENGTHS {
        let own = values(rank, len);
        for root in 0..world {
            let due = values(root, len);
            let mut buffer = own.clone();
            comm.broadcast(BufMut::F32(&mut buffer), Rank(root as u32))?;
            hold!(buffer == due, "broadcast of {len} float32 from {root}");
            let mut buffer = doubles(&own);
            comm.broadcast(BufMut::F64(&mut buffer), Rank(root as u32))?;
            hold!(buffer == doubles(&due), "broadcast of {len} float64 from {root}");
        }
    }
    Ok(true)
}

/// Ranks of one machine share its clock: what each saw on it is gathered and laid side by side.
pub(super) fn barrier(comm: &mut dyn Collective) -> CheckResult {
    let (rank, world) = place(comm);
    let micros = || clock::since_epoch().as_micros() as f64;
    for round in 0..20 {
        if rank == round % world {
            std::thread::sleep(LATE);
        }
        let mut times = vec![0.0; 2 * world];
        times[2 * rank] = micros();
        comm.barrier()?;
        times[2 * rank + 1] = micros();
        comm.all_gather_in_place(BufMut::F64(&mut times))?;
        let came = times.iter().step_by(2).copied().fold(f64::MIN, f64::max);
        let left = times.iter().skip(1).step_by(2).copied().fold(f64::MAX, f64::min);
        hold!(left >= came, "round {round}: a rank left {} us before another entered", came - left);
    }
    Ok(true)
}

pub(super) fn repeated(comm: &mut dyn Collective) -> CheckResult {
    let (rank, world) = place(comm);
    for len in [7, 5000, 70_001] {
        let mut digests = [0.0; 2];
        for digest in &mut digests {
            let mut buffer = uneven(rank, len, 7);
            comm.all_reduce(BufMut::F32(&mut buffer), Reduce::Sum)?;
            let hash = blake3::hash(bytemuck::cast_slice(&buffer));
            *digest = f64::from(u32::from_le_bytes(std::array::from_fn(|i| hash.as_bytes()[i])));
        }
        hold!(digests[0] == digests[1], "a sum of {len} had other bits the second time");
        let mut all = vec![0.0; world];
        comm.all_gather(Buf::F64(&digests[..1]), BufMut::F64(&mut all))?;
        hold!(all.iter().all(|digest| *digest == digests[0]), "a sum of {len} had other bits elsewhere");
    }
    Ok(true)
}

pub(super) fn mixed(comm: &mut dyn Collective) -> CheckResult {
    let (rank, world) = place(comm);
    let progress = comm.progress();
    let counts = || [&progress.entered, &progress.finished].map(|count| count.load(Ordering::Relaxed));
    let before = counts();
    for round in 0..60usize {
        let mut buffer = vec![(rank + round) as f32; (round * 7919) % 20_000];
        let mut vote = [rank as f64, 1.0];
        comm.all_reduce(BufMut::F64(&mut vote), Reduce::Sum)?;
        hold!(vote == [(world * (world - 1) / 2) as f64, world as f64], "vote {vote:?} in round {round}");
        match round % 4 {
            0 => comm.all_reduce(BufMut::F32(&mut buffer), Reduce::Max)?,
            1 => comm.broadcast(BufMut::F32(&mut buffer), Rank((round % world) as u32))?,
            2 => comm.reduce_scatter_in_place(BufMut::F32(&mut buffer), Reduce::Sum)?,
            _ => comm.barrier()?,
        }
    }
    let after = counts();
    hold!(after == before.map(|count| count + 120), "progress went from {before:?} to {after:?}, not by 120");
    Ok(true)
}

pub(super) fn wrong_lengths(comm: &mut dyn Collective) -> CheckResult {
    let world = comm.world();
    let mut whole = vec![0.0f32; 4 * world];
    let refusals = [
        comm.all_gather(Buf::F32(&[0.0; 5]), BufMut::F32(&mut whole)),
        comm.all_gather(Buf::F64(&[0.0; 4]), BufMut::F32(&mut whole)),
        comm.broadcast(BufMut::F32(&mut whole), Rank(world as u32)),
    ];
    for refusal in refusals {
        hold!(matches!(refusal, Err(CollectiveError::Size { .. })), "not refused for its size: {refusal:?}");
    }
    comm.barrier()?;
    Ok(true)
}
