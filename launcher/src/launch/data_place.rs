//! Where a worker listens for its neighbours, and where they are told to call, if the environment says so.

use super::inputs::{Env, SettingText};
use crate::exit::CliError;

/// Where one worker listens, and where its neighbour calls it. All workers of a launcher inherit one
/// environment: each takes the port of its number.
#[derive(Debug, PartialEq, Eq)]
pub struct DataPlace {
    /// Where its neighbour may call; 0 for any free port.
    pub port: u16,
    /// Where its neighbour is told to call, if that is elsewhere: a port that leads here.
    pub advertise: Option<String>,
}

impl DataPlace {
    /// From `COX_DATA_PORT` and `COX_ADVERTISE`.
    pub fn from_env(env: Env<'_>, local_rank: u32) -> Result<Self, CliError> {
        let first = SettingText::variable("COX_DATA_PORT", env).map(|given| given.parse("a whole number"));
        let port = match first.transpose()?.unwrap_or(0u32) {
            0 => 0,
            first => port(u64::from(first), local_rank, "COX_DATA_PORT")?,
        };
        let advertise = env("COX_ADVERTISE").map(|text| advertised(&text, local_rank)).transpose()?;
        Ok(Self { port, advertise })
    }
}

/// The port of a worker, by its number on its machine.
fn port(first: u64, local_rank: u32, name: &str) -> Result<u16, CliError> {
    u16::try_from(first + u64::from(local_rank)).map_err(|_| {
        CliError::usage(format!(
            "{name} {first}: local rank {local_rank} would listen on port {}; ports end at 65535",
            first + u64::from(local_rank)
        ))
    })
}

/// `HOST:PORT` of a worker, from that of its machine's first.
fn advertised(text: &str, local_rank: u32) -> Result<String, CliError> {
    let parts = text.rsplit_once(':').and_then(|(host, first)| Some((host, first.parse().ok()?)));
    let (host, first) =
        parts.ok_or_else(|| CliError::usage(format!("COX_ADVERTISE {text}: expected HOST:PORT")))?;
    Ok(format!("{host}:{}", port(first, local_rank, "COX_ADVERTISE")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(variables: &[(&str, &str)], local_rank: u32) -> Result<DataPlace, String> {
        let env = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        DataPlace::from_env(&env, local_rank).map_err(|failed| failed.message.unwrap())
    }

    #[test]
    fn each_worker_takes_the_port_of_its_number() {
        assert_eq!(place(&[], 3), Ok(DataPlace { port: 0, advertise: None }));
        let mapped = [("COX_DATA_PORT", "7000"), ("COX_ADVERTISE", "gate:9000")];
        assert_eq!(place(&mapped, 1), Ok(DataPlace { port: 7001, advertise: Some("gate:9001".to_owned()) }));
    }

    #[test]
    fn what_is_no_port_is_refused() {
        let told = place(&[("COX_DATA_PORT", "65535")], 1).unwrap_err();
        assert!(told.starts_with("COX_DATA_PORT 65535: local rank 1 "), "{told}");
        assert!(told.contains("would listen on port 65536"), "{told}");
        assert_eq!(
            place(&[("COX_ADVERTISE", "gate")], 0).unwrap_err(),
            "COX_ADVERTISE gate: expected HOST:PORT"
        );
        assert_eq!(
            place(&[("COX_DATA_PORT", "x")], 0).unwrap_err(),
            "COX_DATA_PORT x: expected a whole number"
        );
    }
}
