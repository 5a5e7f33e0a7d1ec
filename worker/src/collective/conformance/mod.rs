//! What every [`Collective`] must do, as programs: each rank runs the same one on its own communicator, a
//! thread or a process each.
//!
//! ```text
//! values    what operations leave in buffers
//! device    the same of buffers in a device's memory
//! endings   aborts, lost ranks, ranks in different collectives: each leaves a communicator that is of no use
//! violation what a rank reports
//! here      the list of them
//! ```
//!
//! A program says what does not hold, as a value. What only some ranks can see (which of them is told of a
//! mismatch depends on who is faster) is held if one of them has seen it.
//!
//! Public because transports are implemented in crates above this one. What it does not do: start ranks.

mod device;
mod endings;
#[cfg(test)]
mod tests;
mod values;
mod violation;

pub use self::{device::on_device, violation::Violation};
use super::Collective;
use violation::hold;

/// Something that a communicator must do, shown by a world of ranks that all run it.
#[derive(Clone, Copy, Debug)]
pub struct Behaviour {
    /// As a sentence.
    pub name: &'static str,
    /// Ranks that it takes at least.
    pub least_world: usize,
    /// Only promised by communicators that add in the order of ranks: a transport has an order of its own.
    pub in_rank_order: bool,
    run: Program,
}

/// One rank's part. True if this rank has seen what one rank at least must see.
type Program = fn(&mut dyn Collective) -> Result<bool, Violation>;

impl Behaviour {
    /// Runs this rank's part on a new communicator.
    pub fn run(&self, comm: &mut dyn Collective) -> Result<bool, Violation> {
        (self.run)(comm)
    }

    /// All that a world of so many ranks can show.
    pub fn of_world(world: usize, in_rank_order: bool) -> impl Iterator<Item = &'static Self> {
        let applies = move |it: &&Self| it.least_world <= world && (in_rank_order || !it.in_rank_order);
        ALL.iter().filter(applies)
    }

    const fn new(name: &'static str, run: Program) -> Self {
        Self { name, least_world: 1, in_rank_order: false, run }
    }

    const fn of_several(name: &'static str, run: Program) -> Self {
        Self { least_world: 2, ..Self::new(name, run) }
    }

    const fn of_three(name: &'static str, run: Program) -> Self {
        Self { least_world: 3, ..Self::new(name, run) }
    }

    const fn in_rank_order(name: &'static str, run: Program) -> Self {
        Self { in_rank_order: true, ..Self::new(name, run) }
    }
}

/// The list.
const ALL: &[Behaviour] = &[
    Behaviour::new("every rank gets the sum and the maximum", values::all_reduce),
    Behaviour::in_rank_order("sums are added in the documented order of ranks", values::order_of_additions),
    Behaviour::new("reduce-scatter leaves each rank its chunk", values::reduce_scatter),
    Behaviour::new("all-gather gives every rank all shards", values::all_gather),
    Behaviour::new("in-place operations split any length into parts of any length", values::in_place),
    Behaviour::new("bfloat16 works in every operation that float32 does", values::halves),
    Behaviour::new("every operation of the optimizer works on device buffers", device::on_flex),
    Behaviour::new("a shift brings the chunk of the rank that far before", values::shift),
    Behaviour::new("broadcast works from every root", values::broadcast),
    Behaviour::new("no rank leaves a barrier before all have entered", values::barrier),
    Behaviour::new("a repeated reduction gives the same bits on all ranks", values::repeated),
    Behaviour::new("operations can follow each other in any order", values::mixed),
    Behaviour::new("a rank sees what others gave to an all-gather before it enters", values::ahead),
    Behaviour::new("wrong lengths are refused and harm nothing", values::wrong_lengths),
    Behaviour::new("an abort ends the collective in flight and all later ones", endings::abort),
    Behaviour::of_several("a lost rank ends a small collective of the others", endings::lost_in_small),
    Behaviour::of_several("a lost rank ends a large collective of the others", endings::lost_in_large),
    Behaviour::of_several("a barrier against a sum is reported", endings::barrier_against_sum),
    Behaviour::of_several("a maximum against a sum is reported", endings::maximum_against_sum),
    Behaviour::of_several("a longer buffer is reported", endings::longer_against_sum),
    Behaviour::of_several("another element type is reported", endings::doubles_against_sum),
    Behaviour::of_three("a shift by another distance is reported", endings::farther_against_near),
    Behaviour::of_several("a large buffer against a small one is reported", endings::large_against_sum),
];
