//! The implementations of this crate, a thread for each rank.

use super::*;
use crate::collective::{
    Solo,
    hybrid::{beside_nothing, over_another_ring},
    loopback_over,
};

/// Makes one rank's communicator, on the thread that will use it.
type Recipe = Box<dyn FnOnce() -> Box<dyn Collective> + Send>;

/// Holds a world of each size to every behaviour, each on communicators of its own.
fn passes(team: impl Fn(usize) -> Vec<Recipe>, worlds: impl IntoIterator<Item = usize>) {
    for world in worlds {
        for behaviour in Behaviour::of_world(world, true) {
            let seen = on_all(behaviour, team(world));
            let (name, held) = (behaviour.name, seen.iter().all(Result::is_ok) && seen.contains(&Ok(true)));
            assert!(held, "{name}, in a world of {world}: by rank {seen:?}");
        }
    }
}

/// What each rank has seen.
fn on_all(behaviour: &'static Behaviour, team: Vec<Recipe>) -> Vec<Result<bool, Violation>> {
    std::thread::scope(|scope| {
        let ranks = team.into_iter();
        let ranks: Vec<_> =
            ranks.map(|connect| scope.spawn(move || behaviour.run(connect().as_mut()))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

fn recipe<C: Collective + 'static>(connect: impl FnOnce() -> C + Send + 'static) -> Recipe {
    Box::new(move || Box::new(connect()))
}

fn ring(shared_memory: bool) -> impl Fn(usize) -> Vec<Recipe> {
    move |world| loopback_over(world, shared_memory).into_iter().map(recipe).collect()
}

#[test]
fn a_world_of_one_does_all_of_it() {
    passes(|_| vec![recipe(Solo::default)], [1]);
}

#[test]
fn a_ring_over_sockets_does_all_of_it() {
    passes(ring(false), 1..=5);
}

#[test]
fn a_ring_in_shared_memory_does_all_of_it() {
    passes(ring(true), 1..=5);
}

#[test]
fn a_ring_beside_a_transport_does_all_of_it() {
    passes(|world| over_another_ring(world).into_iter().map(recipe).collect(), 1..=3);
}

/// What rests on moved data alone.
const ABOUT_VALUES: [&str; 8] = [
    "every rank gets the sum and the maximum",
    "sums are added in the documented order of ranks",
    "reduce-scatter leaves each rank its chunk",
    "all-gather gives every rank all shards",
    "in-place operations split any length into parts of any length",
    "a shift brings the chunk of the rank that far before",
    "every operation of the optimizer works on device buffers",
    "broadcast works from every root",
];

#[test]
fn a_transport_that_moves_nothing_is_found_out() {
    for name in ABOUT_VALUES {
        let behaviour = ALL.iter().find(|it| it.name == name).expect("on the list");
        let seen = on_all(behaviour, beside_nothing(2).into_iter().map(recipe).collect());
        assert!(seen.iter().any(Result::is_err), "{name}: {seen:?}");
    }
}
