//! A step runs again with ranks moved by one slot: is any rank's arithmetic wrong?
//!
//! ```text
//! due       every `faults.replay_every` steps, and in the second attempt of a step whose numbers were not
//!           finite in the first
//! moved     before its own slice, rank r runs the slice of rank r + 1
//! compared  after the vote, and before any gradient moves: digests of each slice's gradients, loss and count
//!           by the two ranks that ran it. Draws are keyed by step and sample, so they are equal, bit for bit
//! third     where they differ, and all weights are equal, another rank runs the slice, too; of two ranks
//!           each runs both slices again, and a computation whose result is known decides where each stands
//!           by its word
//! wrong     the rank is named, and the step runs again, this test included. A rank that is wrong again ends,
//!           and its successor gets its state from the others, as that of a lost rank does
//! unclear   told; the step runs again without the test, and counts
//! ```
//!
//! So a number that is wrong never reaches the optimizer in a step that is replayed, and what is learned has
//! the bits of an undisturbed run. A replayed step takes about twice as long. It needs no memory beyond that
//! of other steps: the other slice runs first, so that gradients need not be kept, and one micro-batch is in
//! use at a time.
//!
//! What this does not do: judge GPUs, whose kernels are chosen by timing and may add in another order (what
//! differs there is told, and nobody is blamed), compare ranks on different kinds of processors, or look at
//! the collectives and the optimizer (`verify` sees what those leave).

mod judge;

use std::{collections::BTreeSet, ops::Range};

use coxswain_nn::{
    kernels::{Tape, flat::Flat},
    params::FlatGrads,
    pulse,
};
use coxswain_proto::{
    cache_plan::CacheUse,
    ids::{Rank, Step},
};

use self::judge::{FIELDS, FIRST, ReplayFinding, ReplayRow, Runs, SliceOutcome, second};
use super::verify;
use crate::train::{Lookout, Members, Share, TimeBreakdown, TrainError, Verdict, Vote, Workbench};
use crate::{
    collective::{Buf, BufMut, Computes},
    feeder::StepRequest,
    health,
    link::{Phase, Report},
};

/// What the attempts of a step have shown of whose gradients are wrong.
#[derive(Debug, Default)]
pub(in crate::train) struct Suspicions {
    /// Ranks that were wrong in the attempt before.
    wrong: BTreeSet<Rank>,
    /// Nothing can be concluded: the step is not replayed again.
    given_up: bool,
}

/// A moved run, made before a rank's own.
pub(in crate::train) struct MovedRun(Option<SliceOutcome>);

/// What an attempt has come to when ranks compare.
pub(in crate::train) struct AttemptOutcome<'a> {
    pub moved: MovedRun,
    /// Sums over this rank's own slice.
    pub share: &'a Share,
    /// How this rank fared there.
    pub fared: Vote,
    pub verdict: &'a Verdict,
}

impl Suspicions {
    /// All ranks: whether this attempt of the step is compared; `doubtful` if the one before had numbers that
    /// were not finite.
    fn is_due<B: Tape<Base = B>>(&self, bench: &Workbench<'_, B>, doubtful: bool) -> bool {
        let (step, every) = (bench.next, bench.run.spec.faults.replay_every);
        let regular = every > 0 && step.0 > 0 && step.0.is_multiple_of(every);
        // Alone, a rank has run the step twice by then.
        let doubtful = doubtful && bench.members.world() > 1;
        (regular || doubtful || !self.wrong.is_empty()) && !self.given_up && !bench.run.leaves_out(step)
    }

    /// Runs the next rank's slice, if this attempt is compared.
    pub fn run_moved<B: Tape<Base = B>>(
        &self,
        bench: &mut Workbench<'_, B>,
        doubtful: bool,
    ) -> Result<Option<MovedRun>, TrainError> {
        match self.is_due(bench, doubtful) {
            true => run(bench, bench.next, FIRST[1]).map(|outcome| Some(MovedRun(outcome))),
            false => Ok(None),
        }
    }

    /// All ranks, after a vote: compares what each slice came to. True if the step is to run again, since
    /// this attempt's gradients are wrong or gone.
    pub fn compare<B: Tape<Base = B>>(
        &mut self,
        bench: &mut Workbench<'_, B>,
        attempted: &AttemptOutcome<'_>,
    ) -> Result<bool, TrainError> {
        let step = bench.next;
        // An attempt that did not get through on all ranks runs again, or ends the generation.
        if !matches!(attempted.verdict.fared.0, Vote::Ok | Vote::NotFinite) {
            return Ok(false);
        }
        // A rank that gave up, for another one's sake, has the gradients of a part of its slice.
        let own = match attempted.fared {
            Vote::Ok => Some(digest(&mut bench.learner.grads, attempted.share)),
            Vote::NotFinite => Some(SliceOutcome::NotFinite),
            Vote::GaveUp | Vote::OutOfMemory | Vote::Failed => None,
        };
        let rows = gather(bench, step, [own, attempted.moved.0], true)?;
        let mut runs = Runs::new(rows.len());
        runs.add(&FIRST, &rows);
        let disputed = runs.disputed();
        if disputed.is_empty() || rows.iter().any(|row| row.kind != rows[0].kind) {
            self.wrong.clear();
            return Ok(false);
        }
        // Wrong weights make wrong gradients, and have a remedy of their own.
        verify::compare(step, &bench.run, &mut bench.members, &mut bench.learner, &mut bench.stats.meter)?;
        let (rank, world) = (bench.members.rank().0 as usize, rows.len());
        let mut outcomes = [None; 2];
        for (outcome, shift) in outcomes.iter_mut().zip(second(world)) {
            if disputed.contains(&((rank + shift) % world)) {
                *outcome = run(bench, step, *shift)?;
            }
        }
        let known = health::known::compute::<B>(&bench.learner.trainables.device());
        if let Err(wrong) = &known {
            bench.members.link.report(Report::HardwareFault(wrong.to_string()))?;
        }
        let rows = gather(bench, step, outcomes, known.is_ok())?;
        runs.add(second(world), &rows);
        let sound: Vec<bool> = rows.iter().map(|row| row.sound).collect();
        self.conclude(step, runs.judge(&sound), &mut bench.members)?;
        Ok(true)
    }

    /// Says what was found, and who has to go.
    fn conclude(
        &mut self,
        step: Step,
        finding: ReplayFinding,
        members: &mut Members,
    ) -> Result<(), TrainError> {
        let own = members.rank();
        let wrong = match finding {
            ReplayFinding::Wrong(ranks) if members.computes != Computes::OnGpu => ranks,
            ReplayFinding::Wrong(ranks) | ReplayFinding::Unclear(ranks) => {
                self.given_up = true;
                if own == Rank(0) {
                    let line = words_of_doubt(step, &ranks);
                    members.link.report(Report::Note(line))?;
                }
                return Ok(());
            }
        };
        let again: BTreeSet<Rank> = self.wrong.intersection(&wrong).copied().collect();
        if again.contains(&own) {
            // Its failure says so, and counts.
            return Err(TrainError::WrongResult { step });
        }
        if wrong.contains(&own) {
            let line = format!(
                "step {step}: this rank's gradients differ from what other ranks compute from the same \
                 samples; the step is repeated. If this happens again, check this rank's device"
            );
            members.link.report(Report::HardwareFault(line))?;
        }
        if let Some(rank) = again.first() {
            return Err(TrainError::PeerFailed(*rank));
        }
        self.wrong = wrong;
        Ok(())
    }
}

fn words_of_doubt(step: Step, ranks: &BTreeSet<Rank>) -> String {
    let ranks: Vec<_> = ranks.iter().map(Rank::to_string).collect();
    format!(
        "step {step}: ranks {} compute different gradients from the same samples, and it is unknown \
         which are right: the step is committed with the gradients that each rank computed",
        ranks.join(", ")
    )
}

/// All ranks say what they came to.
fn gather<B: Tape<Base = B>>(
    bench: &mut Workbench<'_, B>,
    step: Step,
    outcomes: [Option<SliceOutcome>; 2],
    sound: bool,
) -> Result<Vec<ReplayRow>, TrainError> {
    bench.enter(Phase::Communication, step)?;
    let row = ReplayRow { outcomes, kind: health::kind::of(bench.members.computes), sound }.encode();
    let mut table = vec![0.0; FIELDS * bench.members.comm.world()];
    bench.members.comm.all_gather(Buf::F64(&row), BufMut::F64(&mut table))?;
    Ok(ReplayRow::decode_all(&table))
}

/// Runs the slice of the rank so many behind this one; none where that cannot be done here. Leaves the
/// gradients of that slice behind.
fn run<B: Tape<Base = B>>(
    bench: &mut Workbench<'_, B>,
    step: Step,
    shift: usize,
) -> Result<Option<SliceOutcome>, TrainError> {
    let mut share = Share::default();
    let outcome = match add_up(bench, step, shift, &mut share) {
        Ok(true) => Some(digest(&mut bench.learner.grads, &share)),
        Ok(false) => None,
        Err(error) if error.is_not_finite() => Some(SliceOutcome::NotFinite),
        // Its own rank meets this, too, if it is the sample's or the batch's fault.
        Err(error @ (TrainError::DoesNotFit { .. } | TrainError::Data(_) | TrainError::Task(_))) => {
            tracing::info!(step = step.0, %error, "another rank's micro-batches cannot be run here: the check of its gradients is skipped");
            None
        }
        Err(error) => return Err(error),
    };
    // Another rank's slice says nothing of what this rank's micro-batches take.
    bench.stats.meter.overlook();
    bench.stats.meter.take_overrun();
    Ok(outcome)
}

/// Sums of loss and gradients over the slice of the rank so many behind this one, in its micro-batches; false
/// where its features cannot be had.
fn add_up<B: Tape<Base = B>>(
    bench: &mut Workbench<'_, B>,
    step: Step,
    shift: usize,
    share: &mut Share,
) -> Result<bool, TrainError> {
    let (rank, world) = (bench.members.rank().0, bench.members.world());
    let slice = Rank((rank + shift as u32) % world);
    let Some(request) = request(bench, step, slice) else { return Ok(false) };
    bench.stats.injected.flip_a_bit(&bench.members, &mut bench.learner, step);
    bench.learner.begin_gradients();
    let (mut spent, mut used) = (TimeBreakdown::default(), CacheUse::default());
    for number in 0.. {
        bench.enter(Phase::Data, step)?;
        let Some(mut prepared) = bench.feed.prefetch.aside(&request, number)? else { break };
        bench.with_features(|features, desk| features.complete(desk, step, &mut prepared, &mut used))?;
        let batch = &*prepared.batch;
        // An attempt that is lost elsewhere is no reason to leave this one: it may be what decides.
        let mut loss = bench.pass(Lookout::blind(), step, batch, &mut spent)?;
        let injected = &mut bench.stats.injected;
        loss.loss_sum = match shift % world as usize {
            0 => injected.loss(slice, step, loss.loss_sum),
            _ => injected.loss_elsewhere(slice, step, loss.loss_sum),
        };
        bench.learner.judge(step, batch, &loss, true)?;
        share.loss_sum += loss.loss_sum;
        share.valid_count += loss.valid;
    }
    let rank = bench.members.rank();
    bench.stats.injected.flip_a_gradient(rank, step, shift == 0, &mut bench.learner.grads);
    Ok(true)
}

/// What a rank consumes in this step; none if its features are in a generation that is not known here.
fn request<B: Tape<Base = B>>(bench: &Workbench<'_, B>, step: Step, slice: Rank) -> Option<StepRequest> {
    let (world, batch) = (bench.members.world(), bench.run.plan.batch(step));
    let range: Range<u64> = batch.of_rank(slice, world);
    let quarantined = &bench.members.assignment.quarantined;
    let positions = bench.feed.usable(bench.run.spec.run.seed, quarantined, batch.epoch, range);
    let phase = bench.feed.claimed.front().map(|claim| &claim.cache_phase)?;
    let kept = match &bench.features {
        Some(features) => features.source(phase, step, &Default::default())?,
        None => None,
    };
    let (epoch, micro_batch) = (batch.epoch, bench.feed.micro_batch);
    Some(StepRequest { step, epoch, positions, micro_batch, kept })
}

/// What the gradients that are there now, and these sums, come to.
fn digest<F: Flat>(grads: &mut FlatGrads<F>, share: &Share) -> SliceOutcome {
    /// Elements that are brought to the host at once.
    const CHUNK: usize = 1 << 20;
    let grads = grads.values_mut();
    let len = grads.len();
    if !grads.squares(&[0..len]).is_finite() {
        return SliceOutcome::NotFinite;
    }
    let mut hash = blake3::Hasher::new();
    for begin in (0..len).step_by(CHUNK) {
        hash.update(bytemuck::cast_slice(&grads.read(begin..len.min(begin + CHUNK))));
        pulse::beat();
    }
    hash.update(&share.loss_sum.to_bits().to_le_bytes());
    hash.update(&share.valid_count.to_bits().to_le_bytes());
    let bytes = hash.finalize();
    SliceOutcome::Digest(u64::from_le_bytes(*bytes.as_bytes().first_chunk().expect("a digest has 32 bytes")))
}
