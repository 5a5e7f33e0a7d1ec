use std::path::Path;

use coxswain_proto::{
    report::Totals,
    witness::{WitnessedStep, bits},
};

use super::*;

const RUN: &str = "r1";
/// The step whose samples were left out.
const SKIPPED: u64 = 5;
/// The position that is quarantined in the second generation.
const HOLE: Range<u64> = 5..6;

fn totals() -> Totals {
    Totals { loss_sum: 2.0, valid_count: 4.0, grad_norm: 0.25 }
}

/// Ten samples in steps of four, 4 + 4 + 2. Generation 1 has taken steps 0 to 4, generation 2 went on from
/// step 3 without one of the samples; its last step was left out.
fn records() -> RunRecords {
    let row = |step: u64| {
        let (begin, quarantined) = (step % 3 * 4, if step == 4 { vec![HOLE] } else { Vec::new() });
        let skipped = Skip { cause: SkipCause::Loss, samples: Vec::new() };
        CommittedStep {
            step,
            epoch: step / 3,
            generation: if step < 3 { 1 } else { 2 },
            world: 2,
            positions: plan::without(begin..(begin + 4).min(10), &quarantined),
            quarantined,
            loss: if step == SKIPPED { 0.0 } else { 0.5 },
            skipped: (step == SKIPPED).then_some(skipped),
            ..CommittedStep::default()
        }
    };
    RunRecords {
        run_id: RUN.into(),
        samples: 10,
        global_batch: 4,
        total_steps: Some(6),
        finished: true,
        over: true,
        steps: (0..6).map(row).collect(),
        ..RunRecords::default()
    }
}

fn line(step: u64, generation: u64, rank: u32) -> WitnessedStep {
    let (begin, hole) = (step % 3 * 4, step == 4 && generation == 2);
    let batch = Batch { epoch: step / 3, positions: begin..(begin + 4).min(10) };
    let left_out = if hole { vec![HOLE] } else { Vec::new() };
    let skipped = step == SKIPPED;
    WitnessedStep {
        run: RUN.into(),
        step,
        generation,
        rank,
        world: 2,
        epoch: batch.epoch,
        positions: plan::without(batch.of_rank(Rank(rank), 2), &left_out),
        left_out,
        skipped: skipped.then_some(SkipCause::Loss),
        totals: bits(&if skipped { Totals::default() } else { totals() }),
        ..WitnessedStep::default()
    }
}

/// Lines that count, and those of steps that were taken again.
fn lines() -> (Vec<WitnessedStep>, Vec<WitnessedStep>) {
    let of = |steps: Range<u64>, generation| {
        steps.flat_map(move |step| [0, 1].map(|rank| line(step, generation, rank)))
    };
    (of(0..3, 1).chain(of(3..6, 2)).collect(), of(3..5, 1).collect())
}

fn judged(records: &RunRecords, lines: impl IntoIterator<Item = WitnessedStep>) -> Judgement {
    let mut testimony = Testimony::default();
    let text: Vec<String> =
        lines.into_iter().map(|line| serde_json::to_string(&line).expect("numbers") + "\n").collect();
    testimony.add(Path::new("witness/a.jsonl"), text.concat().as_bytes());
    compare(records, &testimony)
}

fn all() -> Vec<WitnessedStep> {
    let (counting, superseded) = lines();
    [superseded, counting].concat()
}

#[test]
fn a_run_that_was_as_its_ledger_says_is_borne_out() {
    let judgement = judged(&records(), all());
    let bare = Judgement { files: 1, steps: 6, ..Judgement::default() };
    assert_eq!(judgement, bare);
}

#[test]
fn every_single_change_of_the_ledger_is_found() {
    type Edit = (&'static str, fn(&mut CommittedStep));
    let edits: [Edit; 13] = [
        ("another epoch", |row| row.epoch += 1),
        ("the generation before", |row| row.generation -= 1),
        ("a later generation", |row| row.generation += 1),
        ("another world", |row| row.world += 1),
        ("no world", |row| row.world = 0),
        ("a position less at the front", |row| row.positions[0].start += 1),
        ("a position less at the end", |row| row.positions.last_mut().unwrap().end -= 1),
        ("a position more", |row| row.positions.last_mut().unwrap().end += 1),
        ("other positions", |row| row.positions.iter_mut().for_each(|of| *of = of.start + 4..of.end + 4)),
        ("a position quarantined", |row| {
            let first = row.positions[0].start;
            row.quarantined.push(first..first + 1);
            row.positions[0].start += 1;
        }),
        ("quarantined and trained on", |row| row.quarantined.push(row.positions[0].clone())),
        ("another loss", |row| row.loss += 0.001),
        ("another cause to leave it out", |row| {
            row.skipped = match row.skipped {
                Some(_) => None,
                None => Some(Skip { cause: SkipCause::Asked, samples: Vec::new() }),
            };
        }),
    ];
    for step in 0..6 {
        for (what, edit) in edits {
            let mut records = records();
            edit(&mut records.steps[step]);
            // Nothing was learned from it: it has no loss.
            if step as u64 == SKIPPED && what == "another loss" {
                continue;
            }
            let found = judged(&records, all()).differences;
            assert!(found.iter().any(|found| found.step == step as u64), "step {step}: {what}: {found:?}");
        }
        let mut records = records();
        records.steps.remove(step);
        assert!(!judged(&records, all()).differences.is_empty(), "step {step} is not in the ledger");
    }
    let mut records = records();
    records.steps[4].positions = vec![4..8];
    records.steps[4].quarantined.clear();
    let found = judged(&records, all()).differences;
    assert!(found.iter().any(|found| found.text.contains("no rank trained on positions 5..6")), "{found:?}");
}

#[test]
fn an_assignment_that_is_swapped_between_two_steps_is_found_though_the_audit_adds_up() {
    let mut records = records();
    let (one, other) = (records.steps[0].positions.clone(), records.steps[1].positions.clone());
    (records.steps[0].positions, records.steps[1].positions) = (other, one);
    let audit = records.audit();
    assert!(audit.iter().all(|account| account.missing.is_empty() && account.duplicate.is_empty()));
    let steps: BTreeSet<u64> = judged(&records, all()).differences.iter().map(|found| found.step).collect();
    assert_eq!(steps, BTreeSet::from([0, 1]));
}

#[test]
fn every_single_change_of_what_a_rank_wrote_is_found() {
    type Edit = (&'static str, fn(&mut WitnessedStep));
    let edits: [Edit; 14] = [
        ("of another run", |line| line.run = "r2".into()),
        ("of another step", |line| line.step += 100),
        ("of the generation before", |line| line.generation -= 1),
        ("of a later generation", |line| line.generation += 1),
        ("by the other rank", |line| line.rank = 1 - line.rank),
        ("by a rank that does not exist", |line| line.rank = 2),
        ("in another world", |line| line.world = 3),
        ("in another epoch", |line| line.epoch += 1),
        ("a sample less", |line| line.positions[0].start += 1),
        ("a sample more", |line| line.positions[0].end += 1),
        ("a sample of no position", |line| line.strangers.push(7)),
        ("left out otherwise", |line| line.left_out.push(0..1)),
        ("skipped otherwise", |line| {
            line.skipped = if line.skipped.is_some() { None } else { Some(SkipCause::Spike) };
        }),
        ("other totals", |line| line.totals[2] ^= 1),
    ];
    let (counting, superseded) = lines();
    for at in 0..counting.len() {
        let step = counting[at].step;
        // The last of their generations: a rank may have been killed before it wrote.
        let is_last = [2, 5].contains(&step);
        for (what, edit) in edits {
            // Nothing was learned from them.
            if step == SKIPPED && ["a sample less", "a sample more"].contains(&what) {
                continue;
            }
            let mut changed = counting.clone();
            edit(&mut changed[at]);
            let Judgement { differences, unproved, .. } =
                judged(&records(), [&superseded[..], &changed].concat());
            let found = !differences.is_empty() || (is_last && !unproved.is_empty());
            assert!(found, "step {step}: {what}: {:?}", changed[at]);
        }
        let twice = [all(), vec![counting[at].clone()]].concat();
        assert!(!judged(&records(), twice).differences.is_empty(), "step {step} is there twice");
        let mut without = counting.clone();
        let missing = without.remove(at);
        let Judgement { differences, unproved, .. } =
            judged(&records(), [&superseded[..], &without].concat());
        match is_last {
            true => assert_eq!((differences, unproved), (Vec::new(), vec![(step, missing.rank)])),
            false => assert!(!differences.is_empty(), "step {step} of rank {} is not there", missing.rank),
        }
    }
}

#[test]
fn what_two_ranks_both_trained_on_names_them() {
    let mut changed = all();
    for line in changed.iter_mut().filter(|line| line.step == 1) {
        line.positions = vec![4..6];
    }
    let texts: Vec<String> = judged(&records(), changed).differences.into_iter().map(|of| of.text).collect();
    assert!(texts.iter().any(|text| text.contains("no rank trained on positions 6..8")), "{texts:#?}");
    assert!(texts.iter().any(|text| text.contains("4..6") && text.contains("ranks 0, 1")), "{texts:#?}");
}

#[test]
fn a_share_of_a_rank_that_was_killed_is_not_anothers() {
    // The last of its generation: that rank 1 has no line is well, that rank 0 has its samples is not.
    let mut changed: Vec<_> = all().into_iter().filter(|line| (line.step, line.rank) != (2, 1)).collect();
    assert_eq!(judged(&records(), changed.clone()).unproved, [(2, 1)]);
    assert!(judged(&records(), changed.clone()).differences.is_empty());
    for line in changed.iter_mut().filter(|line| line.step == 2) {
        line.positions = vec![8..10];
    }
    assert!(!judged(&records(), changed).differences.is_empty());
}

#[test]
fn a_step_that_a_checkpoint_alone_proved_is_borne_out_by_the_generation_before() {
    let mut records = records();
    let row = &mut records.steps[2];
    (row.generation, row.world, row.loss) = (2, 0, 0.0);
    assert_eq!(judged(&records, all()).differences, []);
    let without: Vec<_> = all().into_iter().filter(|line| line.step != 2).collect();
    assert!(!judged(&records, without).differences.is_empty());
}

#[test]
fn launches_of_other_ids_count_where_none_of_this_one_has_the_step() {
    let mut renamed = all();
    renamed.iter_mut().filter(|line| line.generation == 1).for_each(|line| line.run = "job-1".into());
    assert_eq!(judged(&records(), renamed).differences, []);
    // What a run left there whose journal is gone: the same numbers, other ranks.
    let earlier =
        all().into_iter().map(|line| WitnessedStep { run: "r0".into(), positions: vec![0..1], ..line });
    assert_eq!(judged(&records(), all().into_iter().chain(earlier)).differences, []);
}

#[test]
fn a_run_that_goes_on_may_be_further_than_its_ledger() {
    let mut records = RunRecords { finished: false, over: false, ..records() };
    records.steps.truncate(5);
    assert_eq!(judged(&records, all()).differences, []);
    // It went back since the ledger was asked.
    records.steps[3].generation = 1;
    assert_eq!(judged(&records, all()).differences, []);
}

#[test]
fn behind_the_end_of_a_full_file_nothing_is_proved_and_nothing_differs() {
    let mut lines: Vec<_> = all().into_iter().filter(|line| line.rank == 0 || line.step < 2).collect();
    lines.iter_mut().filter(|line| (line.step, line.rank) == (1, 1)).for_each(|line| line.full = true);
    let Judgement { differences, unproved, .. } = judged(&records(), lines);
    assert_eq!((differences, unproved), (Vec::new(), (2..6).map(|step| (step, 1)).collect()));
}

#[test]
fn a_line_that_was_cut_off_is_counted_and_is_no_line() {
    let mut testimony = Testimony::default();
    let whole = serde_json::to_string(&line(0, 1, 0)).unwrap();
    testimony.add(Path::new("a.jsonl"), format!("\n{whole}\n{}", &whole[..40]).as_bytes());
    assert_eq!((testimony.unreadable, testimony.lines().count()), (1, 1));
}
