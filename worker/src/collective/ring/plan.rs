//! Each collective as two lists of spans of one buffer: what this rank sends, and what it receives, in order.
//!
//! With chunks named by their owner, all indices modulo `W`, rank `r`
//!
//! ```text
//! reduce-scatter   sends r-1, r-2, .., r+1        receives r-2, r-3, .., r     and adds
//! all-gather       sends r, r-1, .., r+2          receives r-1, r-2, .., r+1   and keeps
//! all-reduce       the first, then the second
//! shift by d       sends r, r-1, .., r-d+1        receives r-1, r-2, .., r-d   and keeps
//! broadcast        one span: the root sends, the rank before the root receives, all others do both
//! ```
//!
//! In all of them the `i`-th span received is the `i+1`-st span sent (the first one for a broadcast), which
//! is what the pump relies on. All-reduce may overwrite a chunk while the same chunk is still being passed
//! on: the finished values of an element cannot arrive before its partial sum has left, because they are made
//! from it.

use std::ops::Range;

use crate::collective::Cuts;

/// What to do with received elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Keep them.
    Store,
    /// Combine them with what is there.
    Reduce,
}

/// One collective of one rank: what it sends and what it receives.
pub(super) struct Plan<'a, T> {
    pub buffer: &'a mut [T],
    /// Spans of `buffer`, in the order in which they go out; `None` sends nothing, not even a header.
    pub send: Option<Vec<Range<usize>>>,
    /// Spans of `buffer`, in the order in which they come in.
    pub receive: Option<Vec<(Range<usize>, Action)>>,
    /// Elements at the start of the outgoing stream that depend on nothing received.
    pub head: usize,
}

/// `buffer` is cut into the parts of `cuts`; the reduction of this rank's ends in its place.
pub(super) fn reduce_scatter<'a, T>(buffer: &'a mut [T], cuts: &Cuts, rank: usize) -> Plan<'a, T> {
    let (send, receive) = reduce_rounds(cuts, rank);
    let head = send.first().map_or(0, Range::len);
    Plan { buffer, send: Some(send), receive: Some(receive), head }
}

/// `buffer` is cut into the parts of `cuts`; this rank brings its own.
pub(super) fn all_gather<'a, T>(buffer: &'a mut [T], cuts: &Cuts, rank: usize) -> Plan<'a, T> {
    let (send, receive) = gather_rounds(cuts, rank);
    let head = send.first().map_or(0, Range::len);
    Plan { buffer, send: Some(send), receive: Some(receive), head }
}

/// `buffer` is cut into the parts of `cuts`; this rank brings its own and takes that of the rank `distance`
/// before it, after those in between, which it passes on.
pub(super) fn shift<'a, T>(buffer: &'a mut [T], cuts: &Cuts, rank: usize, distance: usize) -> Plan<'a, T> {
    let (mut send, mut receive) = gather_rounds(cuts, rank);
    send.truncate(distance);
    receive.truncate(distance);
    let head = send.first().map_or(0, Range::len);
    Plan { buffer, send: Some(send), receive: Some(receive), head }
}

/// Reduce-scatter and all-gather as one stream.
pub(super) fn all_reduce<'a, T>(buffer: &'a mut [T], cuts: &Cuts, rank: usize) -> Plan<'a, T> {
    let (mut send, mut receive) = reduce_rounds(cuts, rank);
    let head = send.first().map_or(0, Range::len);
    let (gather_send, gather_receive) = gather_rounds(cuts, rank);
    send.extend(gather_send);
    receive.extend(gather_receive);
    Plan { buffer, send: Some(send), receive: Some(receive), head }
}

/// From `root` all the way round to the rank before it.
pub(super) fn broadcast<T>(buffer: &mut [T], world: usize, rank: usize, root: usize) -> Plan<'_, T> {
    let all = 0..buffer.len();
    let last = (root + world - 1) % world;
    Plan {
        head: if rank == root { buffer.len() } else { 0 },
        send: (rank != last).then(|| vec![all.clone()]),
        receive: (rank != root).then(|| vec![(all, Action::Store)]),
        buffer,
    }
}

type Rounds = (Vec<Range<usize>>, Vec<(Range<usize>, Action)>);

fn reduce_rounds(cuts: &Cuts, rank: usize) -> Rounds {
    let world = cuts.world();
    let send = downwards(cuts, rank + world - 1).collect();
    let receive = downwards(cuts, rank + 2 * world - 2).map(|span| (span, Action::Reduce)).collect();
    (send, receive)
}

fn gather_rounds(cuts: &Cuts, rank: usize) -> Rounds {
    let world = cuts.world();
    let send = downwards(cuts, rank + world).collect();
    let receive = downwards(cuts, rank + world - 1).map(|span| (span, Action::Store)).collect();
    (send, receive)
}

/// The parts of `world - 1` rounds, from the owner `first` (modulo `world`, at least `world - 2`) downwards.
fn downwards(cuts: &Cuts, first: usize) -> impl Iterator<Item = Range<usize>> {
    let world = cuts.world();
    (0..world - 1).map(move |round| cuts.part((first - round) % world))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_received_in_one_round_is_sent_in_the_next() {
        for world in 1..=6 {
            for rank in 0..world {
                let (mut buffer, cuts) = (vec![0.0f32; 29], Cuts::equal(29, world));
                let mut plans = vec![
                    reduce_scatter(&mut buffer.clone(), &cuts, rank).spans(),
                    all_gather(&mut buffer.clone(), &cuts, rank).spans(),
                    all_reduce(&mut buffer, &cuts, rank).spans(),
                ];
                plans.extend((1..world).map(|distance| shift(&mut buffer, &cuts, rank, distance).spans()));
                for (send, receive) in plans {
                    assert_eq!(send.len(), receive.len());
                    assert!(send.iter().skip(1).zip(&receive).all(|(sent, received)| sent == received));
                }
            }
        }
    }

    #[test]
    fn what_one_rank_sends_is_what_the_next_receives() {
        for world in 2..=6 {
            for rank in 0..world {
                let (mut mine, mut theirs) = (vec![0.0f32; 31], vec![0.0f32; 31]);
                let cuts = Cuts::equal(31, world);
                let (sent, _) = all_reduce(&mut mine, &cuts, rank).spans();
                let (_, received) = all_reduce(&mut theirs, &cuts, (rank + 1) % world).spans();
                assert_eq!(sent, received);
            }
        }
    }

    impl<T> Plan<'_, T> {
        fn spans(&self) -> (Vec<Range<usize>>, Vec<Range<usize>>) {
            let receive = self.receive.iter().flatten().map(|(span, _)| span.clone()).collect();
            (self.send.clone().unwrap_or_default(), receive)
        }
    }
}
