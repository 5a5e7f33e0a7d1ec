//! Several launchers of one run: what each was asked for is the same run. Workers train what the coordinator
//! says; a launcher with another run file would show figures of a run that there is not.

use std::path::Path;

use coxswain_proto::{
    document,
    run_spec::RunSpec,
    v1::{GetStatusRequest, GetStatusResponse, JoinNodeRequest},
};

use crate::{
    clock,
    control::{Access, prompt},
    endpoint,
    exit::{Failed, Outcome},
    launch::{plan::Plan, rendezvous, worker_env::Place},
};

/// Asks for a launcher's place; `spec` is the run that it was asked for where another one has the
/// coordinator.
pub async fn join(
    spec: Option<&RunSpec>,
    access: &Access,
    plan: &Plan,
    request: &JoinNodeRequest,
) -> Result<Place, Failed> {
    let Some(spec) = spec else { return rendezvous::join(access, plan, request).await };
    let (begin, mut told) = (clock::now(), false);
    // Before it takes a place, which another launcher would wait for.
    loop {
        let asked = access
            .try_look(|mut people| async move { people.get_status(prompt(GetStatusRequest {})).await })
            .await;
        match asked {
            Ok(run) => break agree(spec, access, &run)?,
            Err(status) if begin.elapsed() < rendezvous::patience_with(&status, plan) => {
                if !std::mem::replace(&mut told, true) {
                    let why = access.explain(&status).message.unwrap_or_default();
                    tracing::info!("waiting for the coordinator: {why}");
                }
                tokio::time::sleep(rendezvous::RETRY).await;
            }
            // What is wrong with it is wrong with the place as well, and told there.
            Err(_) => break,
        }
    }
    rendezvous::join(access, plan, request).await
}

/// Refuses a launcher whose run is not the one that its coordinator serves, and names the keys that differ.
fn agree(spec: &RunSpec, access: &Access, run: &GetStatusResponse) -> Outcome {
    if run.spec_digest == document::digest(spec) {
        return Ok(());
    }
    let keys = differences(spec, run);
    let named =
        keys.map_or_else(|| "it is not seen from here in which keys".to_owned(), |keys| keys.join(", "));
    Err(Failed::usage(format!(
        "the coordinator at {} serves run {} with another specification than this node's: {named}; launch all nodes \
         with the same run file and overrides",
        access.address(),
        run.run_name,
    )))
}

/// The keys with both values; none where the run's own specification cannot be read.
fn differences(spec: &RunSpec, run: &GetStatusResponse) -> Option<Vec<String>> {
    let text = std::fs::read(Path::new(&run.output_dir).join("logs").join(endpoint::SPEC_FILE)).ok()?;
    let theirs: RunSpec = serde_json::from_slice(&text).ok()?;
    // A directory of that name on this machine may have another run's.
    if document::digest(&theirs) != run.spec_digest {
        return None;
    }
    let differing = document::differences(&theirs, spec);
    let named: Vec<_> = differing.iter().map(ToString::to_string).collect();
    (!named.is_empty()).then_some(named)
}
