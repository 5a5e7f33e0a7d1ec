//! Runs by the thousand on a disk that fails: the real journal, written through a cache that a loss of power
//! empties.

use coxswain_coordinator::Outcome;
use coxswain_simulator::{script::Script, seeds};

/// Seeds that failed once on a disk that does what it says, and must not again.
///
/// ```text
/// 12056183712165720784   rank 0 is killed in three generations before their first step: an end by name
/// 14973324233663873229   power is lost when a worker has left after the last step: it is missed by name
/// 12311642684111572078   a coordinator killed while it opened its journal was taken for one that cannot
/// 2596490489058126345    a drained launcher ended with its coordinator, which had just told the end
/// 4423636478463093044    a launcher gave its place up while a slow disk kept the coordinator's time
/// 7999064784691979407    a launcher that was frozen heard of one closed line, and not of its other one
/// 1379050043283634393    a launcher that was frozen heard of a closed line before it heard that it was open
/// ```
const FAILED_ONCE: [u64; 7] = [
    12_056_183_712_165_720_784,
    14_973_324_233_663_873_229,
    12_311_642_684_111_572_078,
    2_596_490_489_058_126_345,
    4_423_636_478_463_093_044,
    7_999_064_784_691_979_407,
    1_379_050_043_283_634_393,
];

/// Seeds that failed once on a disk that lies, and must not again.
///
/// ```text
/// 7102262543631994417   a journal that was lost whole beside a checkpoint, which proves the steps before it
/// ```
const LIED_TO_ONCE: [u64; 1] = [7_102_262_543_631_994_417];

#[test]
fn seeds_that_failed_once_do_not_fail_again() {
    let drawn = |seed| Script::drawn_with_storage(seed, false);
    seeds::play_all(FAILED_ONCE, drawn, seeds::finishes_or_is_given_up);
}

#[test]
fn a_disk_that_does_what_it_says_loses_nothing_whatever_happens_to_it() {
    let drawn = |seed| Script::drawn_with_storage(seed, false);
    seeds::play_all(seeds::derived(0..1000), drawn, seeds::finishes_or_is_given_up);
}

#[test]
fn a_disk_that_lies_is_survived_or_the_run_ends_by_name() {
    let (mut finished, mut named, mut forgotten) = (0, 0, 0);
    let drawn = |seed| Script::drawn_with_storage(seed, true);
    seeds::play_all(LIED_TO_ONCE.into_iter().chain(seeds::derived(0..500)), drawn, |report| {
        let failed = matches!(report.outcome, Some(Outcome::Failed(_)));
        finished += u32::from(report.has_finished());
        named += u32::from(failed || report.refused.is_some());
        forgotten += u32::from(report.told("has lost its end").is_some());
        report.has_finished() || failed || report.refused.is_some()
    });
    println!(
        "{finished} have finished, {named} have ended by name, {forgotten} journals have lost their end"
    );
    assert!(finished > 400 && named > 5 || seeds::is_one());
}
