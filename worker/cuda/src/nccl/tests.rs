//! What needs no card: which bytes travel. What needs one is in `tests/card`, where each rank is a process of its own.

use coxswain_proto::ids::Rank;
use coxswain_worker::collective::Reduce;

use super::*;

fn transfer(movement: Movement) -> Transfer {
    Transfer { movement, length: 10, width: 4 }
}

#[test]
fn a_rank_copies_only_what_it_brings_and_only_what_it_receives() {
    // Ten elements on four ranks: chunks of 3, 3, 3, 1.
    for (movement, rank, bytes_in, bytes_out) in [
        (Movement::AllReduce(Reduce::Sum), 1, 0..40, 0..40),
        (Movement::ReduceScatter(Reduce::Sum), 3, 0..40, 36..40),
        (Movement::AllGather, 3, 36..40, 0..40),
        (Movement::Shift, 0, 0..12, 36..40),
        (Movement::Broadcast(Rank(2)), 2, 0..40, 0..0),
        (Movement::Broadcast(Rank(2)), 0, 0..0, 0..40),
    ] {
        let transfer = transfer(movement);
        assert_eq!(brought(&transfer, rank, 4), bytes_in, "{movement:?} brings");
        assert_eq!(received(&transfer, rank, 4), bytes_out, "{movement:?} receives");
    }
}

#[test]
fn without_the_library_there_is_a_sentence() {
    if let Err(missing) = version() {
        assert!(missing.to_string().contains("NCCL") && missing.to_string().contains("install"), "{missing}");
    }
}
