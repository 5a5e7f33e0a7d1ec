//! Looks whether the machine of the coordinator is gone: then a launcher on another one may take its place.
//!
//! It is gone if its launcher shows no sign in the run's directory, and its port takes no connections. A
//! launcher that was only stopped keeps its socket open; a machine that was only cut off goes on writing. One
//! that stood still as a whole will find, when it wakes up, that its role is taken.

use std::time::Duration;

use coxswain_identity::{
    Address,
    claims::{BEAT, Claim, Claims, Watch},
};
use tokio::{net::TcpStream, sync::mpsc, task::JoinHandle, time::timeout};

use super::host::Host;
use crate::{clock, exit::CliError};

/// Between two looks.
const LOOK: Duration = BEAT.checked_div(2).expect("two is not zero");
/// How long a launcher shows no sign before its machine may be gone.
const SILENT: Duration = BEAT.saturating_mul(4);
/// How long a connection may take to such a machine.
const PROBE: Duration = Duration::from_secs(1);

/// How a launcher takes the coordinator over.
pub struct Standby<'a> {
    /// Where claims are announced.
    pub claims: Claims,
    /// The claim of the coordinator that this launcher has joined.
    pub number: u64,
    /// Starts a coordinator in place of the one with this claim; nothing if another launcher was faster.
    pub take_over: &'a dyn Fn(&Claim) -> Result<Option<Host>, CliError>,
    /// What was said of it last.
    pub told: Option<String>,
}

/// A task that is ended when this is dropped.
#[derive(Debug)]
pub struct StandbyTask(JoinHandle<()>);

impl Drop for StandbyTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Starts to look. Claims whose coordinator's machine is gone arrive at `vacant`, again and again until
/// somebody else has the role.
pub fn look(standby: &Standby<'_>, vacant: mpsc::Sender<Claim>) -> StandbyTask {
    let mut watch = Watch::from(standby.claims.clone(), standby.number);
    StandbyTask(tokio::spawn(async move {
        loop {
            tokio::time::sleep(LOOK).await;
            // The directory may be a server's, which takes its time.
            let looked = tokio::task::spawn_blocking(move || {
                let seen = watch.look(clock::now());
                (watch, seen)
            });
            let Ok((after, seen)) = looked.await else { return };
            watch = after;
            // Our own claim, too, where no coordinator could be started after it, as on a full disk.
            let silent = seen.filter(|(_, quiet)| *quiet >= SILENT);
            let Some((claim, _)) = silent else { continue };
            if !answers(&claim.address).await && vacant.send(claim).await.is_err() {
                return;
            }
        }
    }))
}

/// The coordinator that another launcher of the run has now: its port takes connections, and its launcher
/// shows signs of life.
pub async fn living(claims: &Claims) -> Option<Claim> {
    let claim = claims.newest()?;
    if !answers(&claim.address).await {
        return None;
    }
    let (mut watch, begin) = (Watch::from(claims.clone(), claim.number), clock::now());
    watch.look(begin)?;
    while begin.elapsed() < SILENT {
        tokio::time::sleep(LOOK).await;
        if watch.look(clock::now())?.1.is_zero() {
            return claims.newest_from(claim.number);
        }
    }
    None
}

/// Whether a port takes connections.
pub async fn answers(address: &str) -> bool {
    let address = Address::parse(address);
    matches!(timeout(PROBE, TcpStream::connect(address.host_port())).await, Ok(Ok(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_role_is_vacant_when_its_holder_shows_no_sign_and_takes_no_connections() {
        let dir = tempfile::tempdir().unwrap();
        let claims = Claims::of_run(dir.path());
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = port.local_addr().unwrap().to_string();
        let claim = claims.take(&address, "theirs").unwrap();
        let (vacant, mut vacancies) = mpsc::channel(1);
        let take_over = |_: &Claim| Ok(None);
        let standby = Standby { claims: claims.clone(), number: 1, take_over: &take_over, told: None };
        let _looking = look(&standby, vacant);
        // A launcher that was stopped shows no sign for longer than any patience; its port is still there.
        let stopped = timeout(SILENT + LOOK * 4, vacancies.recv()).await;
        assert!(stopped.is_err(), "{stopped:?}");
        drop(port);
        assert_eq!(vacancies.recv().await, Some(claim));
        assert_eq!(living(&claims).await, None);
        let ours = claims.take(&address, "ours").unwrap();
        while vacancies.recv().await.unwrap() != ours {}
        let _port = std::net::TcpListener::bind(&address).unwrap();
        assert_eq!(living(&claims).await, None, "something else may listen there");
        let _held = claims.hold(ours.number, || ()).unwrap();
        assert_eq!(living(&claims).await, Some(ours));
    }
}
