//! What workers and launchers may send, changed in any way, handed to a core that trains: it answers or
//! refuses, and keeps its invariants.

use coxswain_proto::v1;
use prost::Message;

use super::*;
use crate::core::invariants;

/// Reads one kind of message.
type MessageReader = fn(&[u8]) -> Option<Ask>;

fn read<T: Message + Default>(bytes: &[u8]) -> Option<Ask>
where
    Ask: TryFrom<T>,
{
    Ask::try_from(T::decode(bytes).ok()?).ok()
}

const KINDS: [MessageReader; 11] = [
    read::<v1::JoinNodeRequest>,
    read::<v1::RegisterRequest>,
    read::<v1::ReadyRequest>,
    read::<v1::ReportStartRequest>,
    read::<v1::HeartbeatRequest>,
    read::<v1::ReportStepsRequest>,
    read::<v1::ReportMemoryRequest>,
    read::<v1::ReportCheckpointRequest>,
    read::<v1::ReportFailureRequest>,
    read::<v1::ReportExitRequest>,
    read::<v1::ReportCacheRequest>,
];
/// Places in this list.
const JOIN: u8 = 0;
const REGISTER: u8 = 1;
const READY: u8 = 2;
const START: u8 = 3;
const BEAT: u8 = 4;
const STEPS: u8 = 5;
const CHECKPOINT: u8 = 7;
const FAILURE: u8 = 8;
const EXIT: u8 = 9;
/// In the place of a kind: so many times ten milliseconds pass.
const TIME: u8 = 255;

/// A message as a conversation has it: its kind, its length, itself.
fn framed(kind: u8, message: &impl Message) -> Vec<u8> {
    let bytes = message.encode_to_vec();
    [&[kind], &(bytes.len() as u16).to_le_bytes()[..], &bytes].concat()
}

fn passes(ten_ms: u16) -> Vec<u8> {
    [&[TIME], &ten_ms.to_le_bytes()[..]].concat()
}

/// Hands a conversation to a core that trains with two workers; the steps that it has committed in the end.
fn hold(bytes: &[u8]) -> u64 {
    let (mut run, mut rest) = (Run::started(2), bytes);
    while let Some(([kind, low, high], after)) = rest.split_first_chunk() {
        let number = u16::from_le_bytes([*low, *high]);
        if *kind == TIME {
            run.wait(Duration::from_millis(10 * u64::from(number)));
            rest = after;
            continue;
        }
        let (message, after) = after.split_at(usize::from(number).min(after.len()));
        rest = after;
        if let Some(ask) = KINDS[usize::from(*kind) % KINDS.len()](message) {
            run.tell(ask);
        }
        assert_eq!(invariants::violated(&run.machine), None);
        if run.machine.outcome().is_some() {
            break;
        }
    }
    run.machine.committed().0
}

fn step(rank: u32, step: u64) -> Vec<u8> {
    let run = Run::started(2);
    let report = run.report(rank, step);
    let positions = report.positions.iter().map(|of| v1::SampleRange { begin: of.start, end: of.end });
    let wire = v1::StepReport {
        generation: report.generation.0,
        step,
        epoch: report.epoch,
        samples: positions.collect(),
        loss_sum: report.totals.loss_sum,
        valid_count: report.totals.valid_count,
        grad_norm: report.totals.grad_norm,
        ..Default::default()
    };
    framed(STEPS, &v1::ReportStepsRequest { worker_id: run.worker(rank).0, steps: vec![wire] })
}

/// Conversations of sound workers: they train, one is lost and replaced, one fails.
fn conversations() -> [Vec<u8>; 3] {
    let run = Run::started(2);
    let (generation, worker) = (run.machine.run.generation.0, |rank| run.worker(rank).0);
    let trained: Vec<u8> =
        [(0, 0), (1, 0), (0, 1), (1, 1)].into_iter().flat_map(|(rank, at)| step(rank, at)).collect();
    let beat = v1::HeartbeatRequest {
        worker_id: worker(0),
        incarnation: run.incarnation(0),
        generation,
        phase: v1::WorkerPhase::Forward.into(),
        step: 2,
        ..Default::default()
    };
    let exit = v1::ReportExitRequest {
        node_id: NODE.into(),
        rank: 1,
        ended: Some(v1::report_exit_request::Ended::Signal(9)),
        pid: 101,
        out_of_memory: true,
        sample: None,
    };
    let claim = successor(1, 1);
    let register = v1::RegisterRequest {
        version: VERSION.into(),
        run_id: RUN.into(),
        incarnation: claim.incarnation.clone(),
        host: claim.host.clone(),
        pid: claim.pid,
        rank: 1,
        local_rank: 1,
        data_address: claim.data_address.clone(),
        device: claim.device.clone(),
        training_samples: claim.dataset.training_samples,
        dataset_fingerprint: claim.dataset.fingerprint.clone(),
        order_key: claim.dataset.order_key,
        ..Default::default()
    };
    let ready = |rank: u32, incarnation: String| v1::ReadyRequest {
        worker_id: worker(rank),
        incarnation,
        left_generation: generation,
        reason: "its peer is gone".into(),
    };
    let start = v1::ReportStartRequest {
        worker_id: worker(0),
        generation: generation + 1,
        first_step: 2,
        source: v1::StateSource::Replica.into(),
    };
    let join = v1::JoinNodeRequest {
        version: VERSION.into(),
        run_id: RUN.into(),
        node_id: "another".into(),
        host: "node-b".into(),
        local_world_size: 2,
        ..Default::default()
    };
    let checkpoint = v1::ReportCheckpointRequest {
        worker_id: worker(0),
        step: 2,
        state: v1::CheckpointState::Complete.into(),
        path: "checkpoints/step-00000002".into(),
        bytes: 7,
    };
    let failure = v1::Failure {
        kind: v1::FailureKind::PeerLost.into(),
        phase: v1::WorkerPhase::Backward.into(),
        generation,
        step: 2,
        message: "why".into(),
        victims: vec![1],
        ..Default::default()
    };
    let failed = v1::ReportFailureRequest {
        worker_id: Some(worker(1)),
        failure: Some(failure),
        run_id: RUN.into(),
        bad_sample: None,
    };
    let lost = [
        trained.clone(),
        framed(EXIT, &exit),
        framed(REGISTER, &register),
        framed(READY, &ready(0, run.incarnation(0))),
        framed(READY, &ready(1, claim.incarnation)),
        framed(START, &start),
        passes(400),
    ];
    let failing =
        [framed(JOIN, &join), trained.clone(), framed(FAILURE, &failed), passes(100), framed(BEAT, &beat)];
    [
        [trained, framed(CHECKPOINT, &checkpoint), framed(BEAT, &beat), passes(50)].concat(),
        lost.concat(),
        failing.concat(),
    ]
}

#[test]
fn hostile_conversations_keep_the_invariants() {
    assert_eq!(conversations().map(|bytes| hold(&bytes)), [2; 3], "sound ones train");
    coxswain_fuzz::Target::new("conversations", conversations()).tries(1_500).holds(16 << 20, 4096).check(
        |bytes| {
            hold(bytes);
        },
    );
}
