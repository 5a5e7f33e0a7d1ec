//! A check that is not passed on purpose, for tests of what happens then.
//!
//! `COX_FAULT_HEALTH="slot=1 check=known times=2"`: the first two processes of slot 1 do not pass the known
//! computation; or `check=disk`, `check=device`. It is part of the program because the program is what is
//! tested, as `COX_FAULT_LOSS` is. Nothing else reads the variable, and no run depends on it.

use std::env;

const HEALTH: &str = "COX_FAULT_HEALTH";

/// What is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// The device check.
    Known,
    /// What the driver says.
    Device,
    /// A small file.
    Disk,
}

impl Check {
    /// As the variable names it.
    fn word(self) -> &'static str {
        match self {
            Self::Known => "known",
            Self::Device => "device",
            Self::Disk => "disk",
        }
    }
}

/// A fault that a test has asked for.
#[derive(Debug, PartialEq, Eq)]
pub struct InjectedFault;

impl InjectedFault {
    /// Why this process, which its launcher has told its slot and how often it was started again, does not
    /// pass.
    pub fn for_check(check: Check) -> Option<String> {
        let text = env::var(HEALTH).ok().filter(|text| !text.is_empty())?;
        let number = |name: &str| env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
        let fails = fails(&text, check, number("RANK"), number("TORCHELASTIC_RESTART_COUNT"));
        match fails {
            Some(true) => Some(format!("{HEALTH} makes this health check fail: {}", check.word())),
            Some(false) => None,
            None => {
                tracing::error!("{HEALTH}={text:?} is ignored: write `slot=1 check=known times=2`");
                None
            }
        }
    }
}

/// Whether the process of this slot, started again so many times, fails this check.
fn fails(text: &str, check: Check, slot: u32, life: u32) -> Option<bool> {
    let field = |name: &str| text.split_whitespace().find_map(|of| of.strip_prefix(name)?.strip_prefix('='));
    let number = |name: &str| field(name)?.parse::<u32>().ok();
    let due = number("slot")? == slot && life < number("times")?;
    Some(due && field("check")? == check.word())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_check_of_one_slot_fails_in_its_first_lives() {
        let fails = |check, slot, life| fails("slot=1 check=disk times=2", check, slot, life);
        assert_eq!([0, 1, 2].map(|life| fails(Check::Disk, 1, life)), [Some(true), Some(true), Some(false)]);
        assert_eq!(fails(Check::Known, 1, 0), Some(false));
        assert_eq!(fails(Check::Disk, 0, 0), Some(false));
        assert_eq!(super::fails("slot=1 check=disk", Check::Disk, 1, 0), None);
    }
}
