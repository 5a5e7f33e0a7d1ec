//! What every [`Collective`] must do, as tests over a [`Team`]: a recipe for the communicators of one world, one thread each.
//!
//! [`suite!`] makes one test per behaviour for one implementation. Expected values are computed here, element by element, in
//! the documented order of ranks, and compared bit for bit.

use std::sync::atomic::{AtomicUsize, Ordering};

use coxswain_proto::ids::Rank;

use super::{
    Buf, BufMut, Collective, CollectiveError, Reduce, Solo, carried::over_another_ring, chunk, loopback_over,
};
use crate::rng::{Key, Purpose};

/// Makes one rank's communicator, on the thread that will use it.
pub(super) type Recipe = Box<dyn FnOnce() -> Box<dyn Collective> + Send>;
/// Makes the recipes of a world.
pub(super) type Team = fn(usize) -> Vec<Recipe>;

/// Runs `body` on every rank at once; results by rank.
fn on_all<R: Send>(team: Team, world: usize, body: impl Fn(&mut dyn Collective) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> =
            team(world).into_iter().map(|recipe| scope.spawn(move || body(recipe().as_mut()))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

/// Lengths around every border of the implementations: nothing, less than a world, odd, small, one piece, many pieces.
const LENGTHS: [usize; 8] = [0, 1, 3, 64, 1027, 9001, 131_072, 500_009];

/// A rank's values: different on every rank, of all magnitudes, so that the order of additions shows.
fn values(rank: usize, len: usize, salt: u64) -> Vec<f32> {
    let key = Key { seed: salt, purpose: Purpose::FlowNoise, step: rank as u64, sample: 0, repeat: 0 };
    let mut draws = key.draws();
    (0..len).map(|_| (draws.uniform() - 0.5) * (draws.uniform() * 20.0).exp2()).collect()
}

fn doubles(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| f64::from(v) * 1.000_000_1).collect()
}

/// The reduction of all ranks' values in the order `c + 1, c + 2, .., c` for chunk `c`.
fn reduced<T: Copy>(all: &[Vec<T>], join: impl Fn(T, T) -> T) -> Vec<T> {
    let (world, len) = (all.len(), all[0].len());
    let mut out = all[0].clone();
    for owner in 0..world {
        for at in chunk(len, world, owner) {
            let ranks = (1..=world).map(|step| all[(owner + step) % world][at]);
            out[at] = ranks.reduce(&join).expect("a world has a rank");
        }
    }
    out
}

pub(super) fn every_rank_gets_the_sum_and_the_maximum(team: Team, world: usize) {
    for len in LENGTHS {
        let all: Vec<_> = (0..world).map(|rank| values(rank, len, 1)).collect();
        let all_doubles: Vec<_> = all.iter().map(|values| doubles(values)).collect();
        let sum = reduced(&all, |a, b| a + b);
        let max = reduced(&all, f32::max);
        let sum_doubles = reduced(&all_doubles, |a, b| a + b);
        on_all(team, world, |comm| {
            let rank = comm.rank().0 as usize;
            let mut buffer = all[rank].clone();
            comm.all_reduce(BufMut::F32(&mut buffer), Reduce::Sum).expect("sum");
            assert!(buffer == sum, "sum of {len} in a world of {world}");
            buffer.copy_from_slice(&all[rank]);
            comm.all_reduce(BufMut::F32(&mut buffer), Reduce::Max).expect("max");
            assert!(buffer == max, "max of {len} in a world of {world}");
            let mut buffer = all_doubles[rank].clone();
            comm.all_reduce(BufMut::F64(&mut buffer), Reduce::Sum).expect("f64 sum");
            assert!(buffer == sum_doubles, "f64 sum of {len} in a world of {world}");
        });
    }
}

pub(super) fn reduce_scatter_leaves_each_rank_its_chunk(team: Team, world: usize) {
    for len in LENGTHS {
        let whole = len * world;
        let all: Vec<_> = (0..world).map(|rank| values(rank, whole, 2)).collect();
        let sum = reduced(&all, |a, b| a + b);
        on_all(team, world, |comm| {
            let rank = comm.rank().0 as usize;
            let (mut input, mut output) = (all[rank].clone(), vec![f32::NAN; len]);
            comm.reduce_scatter(BufMut::F32(&mut input), BufMut::F32(&mut output), Reduce::Sum).expect("f32");
            assert!(output == sum[len * rank..len * (rank + 1)], "{len} in a world of {world}");
            let (mut input, mut output) = (doubles(&all[rank]), vec![f64::NAN; len]);
            comm.reduce_scatter(BufMut::F64(&mut input), BufMut::F64(&mut output), Reduce::Max).expect("f64");
            assert!(output.iter().all(|v| v.is_finite()));
        });
    }
}

pub(super) fn all_gather_gives_every_rank_all_shards(team: Team, world: usize) {
    for len in LENGTHS {
        let all: Vec<_> = (0..world).map(|rank| values(rank, len, 3)).collect();
        on_all(team, world, |comm| {
            let shard = &all[comm.rank().0 as usize];
            let mut output = vec![f32::NAN; len * world];
            comm.all_gather(Buf::F32(shard), BufMut::F32(&mut output)).expect("f32");
            assert!(output == all.concat(), "{len} in a world of {world}");
            let mut output = vec![f64::NAN; len * world];
            comm.all_gather(Buf::F64(&doubles(shard)), BufMut::F64(&mut output)).expect("f64");
            assert!(output == doubles(&all.concat()));
        });
    }
}

pub(super) fn in_place_operations_cut_any_length(team: Team, world: usize) {
    for len in LENGTHS {
        let all: Vec<_> = (0..world).map(|rank| values(rank, len, 4)).collect();
        let sum = reduced(&all, |a, b| a + b);
        on_all(team, world, |comm| {
            let rank = comm.rank().0 as usize;
            let mut buffer = all[rank].clone();
            comm.reduce_scatter_in_place(BufMut::F32(&mut buffer), Reduce::Sum).expect("scatter");
            let own = chunk(len, world, rank);
            assert!(buffer[own.clone()] == sum[own.clone()], "{len} in a world of {world}");
            buffer[..own.start].fill(f32::NAN);
            buffer[own.end..].fill(f32::NAN);
            comm.all_gather_in_place(BufMut::F32(&mut buffer)).expect("gather");
            assert!(buffer == sum, "{len} in a world of {world}");
        });
    }
}

pub(super) fn a_shift_brings_the_chunk_of_the_rank_before(team: Team, world: usize) {
    for len in LENGTHS {
        on_all(team, world, |comm| {
            let rank = comm.rank().0 as usize;
            let previous = (rank + world - 1) % world;
            let mut buffer = vec![f32::NAN; len];
            let mut due = buffer.clone();
            for owner in [rank, previous] {
                let part = chunk(len, world, owner);
                due[part.clone()].copy_from_slice(&values(owner, len, 9)[part]);
            }
            let own = chunk(len, world, rank);
            buffer[own.clone()].copy_from_slice(&due[own]);
            comm.shift_in_place(BufMut::F32(&mut buffer)).expect("shift");
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert!(bits(&buffer) == bits(&due), "{len} in a world of {world}");
        });
    }
}

pub(super) fn broadcast_works_from_every_root(team: Team, world: usize) {
    for len in LENGTHS {
        on_all(team, world, |comm| {
            for root in 0..world {
                let mut buffer = values(comm.rank().0 as usize, len, 5);
                comm.broadcast(BufMut::F32(&mut buffer), Rank(root as u32)).expect("f32");
                assert!(buffer == values(root, len, 5), "{len} from {root} in a world of {world}");
                let mut buffer = doubles(&values(comm.rank().0 as usize, len, 6));
                comm.broadcast(BufMut::F64(&mut buffer), Rank(root as u32)).expect("f64");
                assert!(buffer == doubles(&values(root, len, 6)));
            }
        });
    }
}

pub(super) fn nobody_leaves_a_barrier_before_all_have_come(team: Team, world: usize) {
    let arrived = AtomicUsize::new(0);
    on_all(team, world, |comm| {
        for round in 1..=20 {
            arrived.fetch_add(1, Ordering::SeqCst);
            comm.barrier().expect("barrier");
            assert!(arrived.load(Ordering::SeqCst) >= round * world);
            comm.barrier().expect("barrier");
        }
    });
}

pub(super) fn a_repeated_run_gives_the_same_bits_on_all_ranks(team: Team, world: usize) {
    let run = || {
        on_all(team, world, |comm| {
            let mut all = Vec::new();
            for len in [7, 5000, 70_001] {
                let mut buffer = values(comm.rank().0 as usize, len, 7);
                comm.all_reduce(BufMut::F32(&mut buffer), Reduce::Sum).expect("sum");
                all.extend(buffer.into_iter().map(f32::to_bits));
            }
            all
        })
    };
    let (first, second) = (run(), run());
    assert!(first == second && first.iter().all(|bits| *bits == first[0]));
}

pub(super) fn operations_follow_each_other_in_any_mix(team: Team, world: usize) {
    on_all(team, world, |comm| {
        let rank = comm.rank().0 as usize;
        for round in 0..60usize {
            let len = (round * 7919) % 20_000;
            let mut buffer = vec![(rank + round) as f32; len];
            let mut vote = [rank as f64, 1.0];
            comm.all_reduce(BufMut::F64(&mut vote), Reduce::Sum).expect("vote");
            assert_eq!(vote, [(world * (world - 1) / 2) as f64, world as f64]);
            match round % 4 {
                0 => comm.all_reduce(BufMut::F32(&mut buffer), Reduce::Max).expect("max"),
                1 => {
                    comm.broadcast(BufMut::F32(&mut buffer), Rank((round % world) as u32)).expect("broadcast")
                }
                2 => comm.reduce_scatter_in_place(BufMut::F32(&mut buffer), Reduce::Sum).expect("scatter"),
                _ => comm.barrier().expect("barrier"),
            }
        }
        assert_eq!(comm.progress().entered.load(Ordering::Relaxed), 120);
        assert_eq!(comm.progress().finished.load(Ordering::Relaxed), 120);
    });
}

pub(super) fn wrong_lengths_are_refused_and_harm_nothing(team: Team, world: usize) {
    on_all(team, world, |comm| {
        let (mut whole, mut part) = (vec![0.0f32; 4 * world], vec![0.0f32; 5]);
        let scattered =
            comm.reduce_scatter(BufMut::F32(&mut whole), BufMut::F32(&mut part), Reduce::Sum).unwrap_err();
        assert!(matches!(scattered, CollectiveError::Size { .. }), "{scattered}");
        let gathered = comm.all_gather(Buf::F32(&part), BufMut::F32(&mut whole)).unwrap_err();
        assert!(matches!(gathered, CollectiveError::Size { .. }), "{gathered}");
        let mut doubles = vec![0.0f64; 4];
        let mixed =
            comm.reduce_scatter(BufMut::F32(&mut whole), BufMut::F64(&mut doubles), Reduce::Sum).unwrap_err();
        assert!(matches!(mixed, CollectiveError::Size { .. }), "{mixed}");
        let rootless = comm.broadcast(BufMut::F32(&mut whole), Rank(world as u32)).unwrap_err();
        assert!(matches!(rootless, CollectiveError::Size { .. }), "{rootless}");
        comm.barrier().expect("the communicator still works");
    });
}

pub(super) fn an_abort_ends_the_collective_in_flight_and_all_later_ones(team: Team, world: usize) {
    // Rank 0 never joins the second collective: the others can only leave it through the abort, or because rank 0 left.
    let outcomes = on_all(team, world, |comm| {
        comm.barrier().expect("barrier");
        if comm.rank().0 == 0 {
            comm.abort_handle().abort("test");
            return comm.barrier();
        }
        let (handle, progress) = (comm.abort_handle(), comm.progress());
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while progress.entered.load(Ordering::Relaxed) < 2 {
                    std::thread::yield_now();
                }
                handle.abort("test");
            });
            let mut buffer = vec![1.0f32; 1 << 20];
            let outcome = comm.all_reduce(BufMut::F32(&mut buffer), Reduce::Sum);
            assert!(comm.barrier().is_err(), "an aborted communicator stays aborted");
            outcome
        })
    });
    for outcome in outcomes {
        let error = outcome.expect_err("nobody finishes");
        let expected = matches!(&error, CollectiveError::Aborted { reason, .. } if reason.contains("test"))
            || matches!(error, CollectiveError::PeerLost { .. });
        assert!(expected, "{error}");
    }
}

pub(super) fn a_dead_rank_ends_the_collective_of_all_others(team: Team, world: usize) {
    for large in [false, true] {
        let outcomes = on_all(team, world, |comm| {
            comm.barrier().expect("barrier");
            if comm.rank().0 == 0 {
                return None;
            }
            let mut buffer = vec![1.0f32; if large { 1 << 21 } else { 4 }];
            let outcome = comm.all_reduce(BufMut::F32(&mut buffer), Reduce::Sum);
            let again = comm.barrier();
            Some((outcome, again))
        });
        for (outcome, again) in outcomes.into_iter().flatten() {
            let error = outcome.expect_err("rank 0 is gone");
            assert!(matches!(error, CollectiveError::PeerLost { .. }), "{error}");
            assert!(again.is_err());
        }
    }
}

pub(super) fn ranks_in_different_collectives_are_told(team: Team, world: usize) {
    type Misstep = fn(&mut dyn Collective) -> Result<(), CollectiveError>;
    let missteps: [Misstep; 5] = [
        |comm| comm.barrier(),
        |comm| comm.all_reduce(BufMut::F32(&mut [0.0; 8]), Reduce::Max),
        |comm| comm.all_reduce(BufMut::F32(&mut [0.0; 9]), Reduce::Sum),
        |comm| comm.all_reduce(BufMut::F64(&mut [0.0; 8]), Reduce::Sum),
        |comm| comm.all_reduce(BufMut::F32(&mut vec![0.0; 1 << 20]), Reduce::Sum),
    ];
    for misstep in missteps {
        let outcomes = on_all(team, world, |comm| match comm.rank().0 {
            0 => misstep(comm),
            _ => comm.all_reduce(BufMut::F32(&mut [0.0; 8]), Reduce::Sum),
        });
        let errors: Vec<_> = outcomes.into_iter().filter_map(Result::err).collect();
        assert_eq!(errors.len(), world, "every rank fails: {errors:?}");
        assert!(errors.iter().any(|e| matches!(e, CollectiveError::Mismatch { .. })), "{errors:?}");
    }
}

fn solo(world: usize) -> Vec<Recipe> {
    assert_eq!(world, 1);
    vec![Box::new(|| Box::new(Solo::default()))]
}

fn shared_ring(world: usize) -> Vec<Recipe> {
    ring(world, true)
}

fn socket_ring(world: usize) -> Vec<Recipe> {
    ring(world, false)
}

fn ring(world: usize, shared_memory: bool) -> Vec<Recipe> {
    loopback_over(world, shared_memory)
        .into_iter()
        .map(|connect| Box::new(move || Box::new(connect()) as Box<dyn Collective>) as Recipe)
        .collect()
}

/// A ring beside a fabric that is another ring: buffers above 64 bytes go the other way.
fn carried(world: usize) -> Vec<Recipe> {
    over_another_ring(world)
        .into_iter()
        .map(|connect| Box::new(move || Box::new(connect()) as Box<dyn Collective>) as Recipe)
        .collect()
}

/// One test per behaviour, each in every world size given.
macro_rules! suite {
    ($name:ident, $team:expr, $worlds:expr, [$($behaviour:ident),* $(,)?]) => {
        mod $name {
            $(
                #[test]
                fn $behaviour() {
                    $worlds.into_iter().for_each(|world| super::$behaviour($team, world));
                }
            )*
        }
    };
}

suite!(
    a_world_of_one,
    super::solo,
    [1],
    [
        every_rank_gets_the_sum_and_the_maximum,
        reduce_scatter_leaves_each_rank_its_chunk,
        all_gather_gives_every_rank_all_shards,
        in_place_operations_cut_any_length,
        a_shift_brings_the_chunk_of_the_rank_before,
        broadcast_works_from_every_root,
        nobody_leaves_a_barrier_before_all_have_come,
        a_repeated_run_gives_the_same_bits_on_all_ranks,
        operations_follow_each_other_in_any_mix,
        wrong_lengths_are_refused_and_harm_nothing,
        an_abort_ends_the_collective_in_flight_and_all_later_ones,
    ]
);

/// All behaviours of one implementation for several ranks.
macro_rules! suites {
    ($of_any:ident, $of_several:ident, $team:expr, $any:expr, $several:expr) => {
        suite!(
            $of_any,
            $team,
            $any,
            [
                every_rank_gets_the_sum_and_the_maximum,
                reduce_scatter_leaves_each_rank_its_chunk,
                all_gather_gives_every_rank_all_shards,
                in_place_operations_cut_any_length,
                a_shift_brings_the_chunk_of_the_rank_before,
                broadcast_works_from_every_root,
                nobody_leaves_a_barrier_before_all_have_come,
                a_repeated_run_gives_the_same_bits_on_all_ranks,
                operations_follow_each_other_in_any_mix,
                wrong_lengths_are_refused_and_harm_nothing,
                an_abort_ends_the_collective_in_flight_and_all_later_ones,
            ]
        );
        suite!(
            $of_several,
            $team,
            $several,
            [a_dead_rank_ends_the_collective_of_all_others, ranks_in_different_collectives_are_told]
        );
    };
}

suites!(a_ring_over_sockets, several_over_sockets, super::socket_ring, 1..=5, 2..=5);
suites!(a_ring_in_shared_memory, several_in_shared_memory, super::shared_ring, 1..=5, 2..=5);
suites!(a_ring_beside_a_fabric, several_beside_a_fabric, super::carried, 1..=3, 2..=3);
