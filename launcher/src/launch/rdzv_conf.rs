//! `--rdzv-conf KEY=VALUE,..`: how the machines of a run meet.

use std::time::Duration;

use super::inputs::{SettingText, boolean};
use crate::exit::CliError;

/// What `--rdzv-conf` says; absent is what it does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RdzvConf {
    /// Whether this launcher starts the coordinator.
    pub is_host: Option<bool>,
    /// How long to wait for as many machines as are needed.
    pub join_timeout: Option<Duration>,
    /// How long, after that, to wait for as many as are allowed.
    pub last_call: Option<Duration>,
}

/// Keys of `torchrun`'s own rendezvous, which mean nothing here.
const NO_EFFECT: [&str; 6] = [
    "close_timeout",
    "heartbeat_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "read_timeout",
    "store_type",
];

impl RdzvConf {
    /// Reads the setting; an unknown key is refused.
    pub fn parse(given: &SettingText) -> Result<Self, CliError> {
        let mut conf = Self::default();
        for pair in given.text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) =
                pair.split_once('=').ok_or_else(|| given.wrong(format_args!("`{pair}` is not KEY=VALUE")))?;
            let value = SettingText { text: value.to_owned(), source: format!("{} {key}", given.source) };
            match key {
                "is_host" => conf.is_host = Some(boolean(&value)?),
                "join_timeout" | "timeout" => conf.join_timeout = Some(seconds(&value)?),
                "last_call_timeout" => conf.last_call = Some(seconds(&value)?),
                _ if NO_EFFECT.contains(&key) => {}
                _ => {
                    return Err(given.wrong(format_args!(
                        "`{key}` is unknown; use is_host, join_timeout or last_call_timeout"
                    )));
                }
            }
        }
        Ok(conf)
    }
}

/// Longest that anything is waited for: a year. Clocks have an end.
pub const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// A duration that can be waited for, if this is one.
pub fn wait_of(seconds: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(seconds).ok().filter(|duration| *duration <= LONGEST)
}

/// A duration in seconds.
pub fn seconds(given: &SettingText) -> Result<Duration, CliError> {
    let seconds = given.parse("a number of seconds")?;
    wait_of(seconds).ok_or_else(|| given.wrong("expected a number of seconds, at most 31536000 (a year)"))
}
