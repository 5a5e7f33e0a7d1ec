//! Which seeds the tests play: the first ones, or others that are derived from a text, such as a day: the
//! same text gets the same answer, and the next one gets new cases.
//!
//! ```text
//! SIMULATOR_FROM=TEXT    derives seeds from this
//! SIMULATOR_SEED=N       plays this one and shows it, in place of all others
//! SIMULATOR_TIMES=N      plays so many times as many
//! ```

use std::{env, ops::Range};

use coxswain_coordinator::Outcome;

use crate::{Report, play, random::Random, script::Script};

/// Reports of seeds that fail, the first so many.
const SHOWN: usize = 4;

/// How many drawn runs there are for one that may be given up.
const GIVEN_UP_OF: usize = 100;

/// A part of the seeds, or the one that was asked for.
pub fn derived(part: Range<u64>) -> Vec<u64> {
    if let Some(seed) = number("SIMULATOR_SEED") {
        return vec![seed];
    }
    let times = number("SIMULATOR_TIMES").unwrap_or(1);
    let all = part.start * times..part.end * times;
    let Ok(from) = env::var("SIMULATOR_FROM") else { return all.collect() };
    println!("seeds are derived from {from}");
    of_text(&from, all)
}

fn of_text(text: &str, numbers: Range<u64>) -> Vec<u64> {
    // FNV-1a (Fowler, Noll, Vo).
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    numbers.map(|number| Random::new(hash ^ number).next()).collect()
}

/// Whether one seed was asked for: then there is no statistic.
pub fn is_one() -> bool {
    number("SIMULATOR_SEED").is_some()
}

/// Plays the script of each seed. Fails with those that break what must hold, or whose run does not end as
/// `expected`.
pub fn play_all(
    seeds: impl IntoIterator<Item = u64>,
    draw: impl Fn(u64) -> Script,
    mut expected: impl FnMut(&Report) -> bool,
) {
    let (mut bad, mut played, mut given_up) = (Vec::new(), 0, 0);
    for seed in seeds {
        let script = draw(seed);
        let report = play(&Script { verbose: is_one(), ..script });
        if is_one() {
            println!("{report}");
        }
        played += 1;
        given_up += usize::from(is_given_up(&report));
        if !expected(&report) || !report.violations.is_empty() {
            bad.push((seed, report));
        }
    }
    println!("{played} runs, {given_up} given up, {} fail", bad.len());
    let all: Vec<_> = bad.iter().map(|(seed, _)| seed).collect();
    let first: Vec<_> = bad.iter().take(SHOWN).map(|(seed, it)| format!("{}\n{it}", again(*seed))).collect();
    assert!(bad.is_empty(), "{} seeds fail: {all:?}\n{}", bad.len(), first.join("\n\n"));
    let is_rare = given_up <= 1 + played / GIVEN_UP_OF || played < GIVEN_UP_OF;
    assert!(is_rare, "{given_up} of {played} runs were given up");
}

/// Whether a run has finished, or was given up by name, as few scripts bring it about ([`GIVEN_UP_OF`]).
pub fn finishes_or_is_given_up(report: &Report) -> bool {
    report.has_finished() || is_given_up(report)
}

/// Whether its script ended three generations in a row before their first step; or had several ranks hang in
/// one phase, of whom none is lost; or the coordinator's machine was lost when all steps were done and
/// workers had left, whom their launchers do not start again.
fn is_given_up(report: &Report) -> bool {
    let Some(Outcome::Failed(cause)) = &report.outcome else { return false };
    let was_done = report.committed == report.steps && cause.message.contains("joined within");
    let hang_alike =
        report.told("in the same way").is_some() && cause.message.contains("were not ready within");
    was_done || hang_alike || cause.message.contains("generations in a row ended without a committed step")
}

/// How a seed is played again.
fn again(seed: u64) -> String {
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    format!(
        "seed {seed}; again: SIMULATOR_SEED={seed} cargo test -p coxswain-simulator {test} -- --nocapture"
    )
}

fn number(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::of_text;

    #[test]
    fn one_text_has_the_same_seeds_again_and_another_has_others() {
        let [first, again, other] = ["3f2a", "3f2a", "3f2b"].map(|text| of_text(text, 0..1000));
        assert_eq!(first, again);
        let all: BTreeSet<_> = first.iter().chain(&other).collect();
        assert_eq!(all.len(), 2000);
        assert_eq!(of_text("3f2a", 500..600), first[500..600], "a part of a test's seeds are that test's");
    }
}
