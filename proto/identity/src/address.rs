//! Where a coordinator is, and whether TLS is spoken there.

use std::{fmt, net::IpAddr};

use crate::claims::{Claim, Claims};

/// Whether TLS is spoken at an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encryption {
    /// Wherever a connection leaves this machine: what an address without a scheme says.
    #[default]
    Elsewhere,
    /// Always: `https://`. For tunnels, whose near end is on this machine.
    Always,
    /// Never: `http://`, for coordinators that were started with `--plaintext`.
    Never,
}

/// `HOST:PORT`, `http://HOST:PORT` or `https://HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    host_port: String,
    encryption: Encryption,
}

impl Address {
    /// Reads one; what is no `HOST:PORT` is found when it is called.
    pub fn parse(text: &str) -> Self {
        let text = text.trim();
        let schemes = [("https://", Encryption::Always), ("http://", Encryption::Never)];
        let with_scheme = schemes.iter().find_map(|(scheme, how)| Some((text.strip_prefix(scheme)?, *how)));
        let (host_port, encryption) = with_scheme.unwrap_or((text, Encryption::Elsewhere));
        Self { host_port: host_port.trim_end_matches('/').to_owned(), encryption }
    }

    /// Reads one that was found in a directory, where somebody else may have written it: it is called in
    /// clear beyond this machine only if the user has said `plaintext`.
    pub fn found(text: &str, plaintext: bool) -> Self {
        let found = Self::parse(text);
        match found.encryption {
            Encryption::Never if !plaintext => Self { encryption: Encryption::Elsewhere, ..found },
            _ => found,
        }
    }

    /// Where a claim says. Another user's may name any port of this machine, where TLS alone tells who
    /// answers.
    pub fn of_claim(claim: &Claim, plaintext: bool) -> Self {
        let found = Self::found(&claim.address, plaintext);
        if claim.is_ours { found } else { found.encrypted() }
    }

    /// This place, through TLS on this machine, too.
    pub fn encrypted(self) -> Self {
        Self { encryption: Encryption::Always, ..self }
    }

    /// Whether it is called in clear wherever it is.
    pub fn is_plaintext(&self) -> bool {
        self.encryption == Encryption::Never
    }

    /// A port of a host: a name, or an address. IPv6 addresses are given brackets where they have none.
    pub fn of(host: &str, port: u16) -> Self {
        match host.parse::<std::net::Ipv6Addr>() {
            Ok(address) => Self::parse(&format!("[{address}]:{port}")),
            Err(_) => Self::parse(&format!("{host}:{port}")),
        }
    }

    /// This place, in clear if `plaintext` says so.
    pub fn plaintext(self, plaintext: bool) -> Self {
        let encryption = if plaintext { Encryption::Never } else { self.encryption };
        Self { encryption, ..self }
    }

    /// `HOST:PORT`.
    pub fn host_port(&self) -> &str {
        &self.host_port
    }

    /// The port, if it is one.
    pub fn port(&self) -> Option<u16> {
        self.host_port.rsplit_once(':')?.1.parse().ok()
    }

    /// The host, an IPv6 address without its brackets.
    pub fn host(&self) -> &str {
        let host = self.host_port.rsplit_once(':').map_or(&*self.host_port, |(host, _)| host);
        host.trim_start_matches('[').trim_end_matches(']')
    }

    /// Whether a connection that has reached `ip` is encrypted.
    pub(crate) fn encrypts(&self, ip: IpAddr) -> bool {
        match self.encryption {
            Encryption::Always => true,
            Encryption::Never => false,
            Encryption::Elsewhere => !is_here(ip),
        }
    }
}

/// Where the coordinator of a run is called now: at an address, until a newer claim to its role names
/// another.
#[derive(Clone, Debug)]
pub struct Whereabouts {
    first: Address,
    /// And the number of the claim that `first` belongs to.
    claims: Option<(Claims, u64)>,
}

impl Whereabouts {
    /// Here, as long as the run lasts.
    pub fn fixed(address: Address) -> Self {
        Self { first: address, claims: None }
    }

    /// Here, unless the role is claimed with a number above `number`.
    pub fn until_moved(address: Address, claims: Claims, number: u64) -> Self {
        Self { first: address, claims: Some((claims, number)) }
    }

    /// Where it was called at first.
    pub fn first(&self) -> &Address {
        &self.first
    }

    /// Where its successors are announced, and its own number; nothing if there are none.
    pub fn claims(&self) -> Option<(&Claims, u64)> {
        self.claims.as_ref().map(|(claims, number)| (claims, *number))
    }

    /// Where it is called now. Reads a directory if it can move.
    pub fn now(&self) -> Address {
        let newest = self
            .claims
            .as_ref()
            .and_then(|(claims, number)| claims.newest_from(*number).filter(|claim| claim.number > *number));
        newest
            .map_or_else(|| self.first.clone(), |claim| Address::of_claim(&claim, self.first.is_plaintext()))
    }
}

impl fmt::Display for Whereabouts {
    /// Where it is called now.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.now().fmt(f)
    }
}

/// Whether bytes to and from `ip` do not leave this machine.
pub(crate) fn is_here(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

impl fmt::Display for Address {
    /// As [`Address::parse`] reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.encryption {
            Encryption::Elsewhere => "",
            Encryption::Always => "https://",
            Encryption::Never => "http://",
        };
        write!(f, "{scheme}{}", self.host_port)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn tls_is_spoken_wherever_a_connection_leaves_the_machine_unless_the_address_says_otherwise() {
        let here = ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"];
        let elsewhere = ["10.0.0.4", "192.0.2.1", "fe80::1", "::ffff:10.0.0.4"];
        let encrypts = |address: &str, ip: &&str| Address::parse(address).encrypts(ip.parse().unwrap());
        assert!(!here.iter().any(|ip| encrypts("node0:29400", ip)));
        assert!(elsewhere.iter().all(|ip| encrypts("node0:29400", ip)));
        assert!(here.iter().chain(&elsewhere).all(|ip| encrypts("https://node0:29400/", ip)));
        assert!(!here.iter().chain(&elsewhere).any(|ip| encrypts("http://node0:29400", ip)));
    }

    #[test]
    fn a_coordinator_is_called_where_the_newest_claim_says() {
        let dir = tempfile::tempdir().unwrap();
        let claims = Claims::of_run(dir.path());
        let here = Address::parse("node0:1");
        let number = claims.take("node0:1", "a").unwrap().number;
        let from = |first: Address| Whereabouts::until_moved(first, claims.clone(), number);
        assert_eq!(from(here.clone()).now(), here);
        claims.take("http://node1:2", "b").unwrap();
        assert_eq!(from(here.clone().plaintext(true)).now().to_string(), "http://node1:2");
        assert_eq!(
            from(here.clone()).now().to_string(),
            "node1:2",
            "in clear only where the user has said so"
        );
        assert_eq!(Whereabouts::fixed(here.clone()).now(), here);
    }

    #[test]
    fn a_claim_of_another_user_is_called_through_tls_on_this_machine_too() {
        let dir = tempfile::tempdir().unwrap();
        let claims = Claims::of_run(dir.path());
        let number = claims.take("127.0.0.1:1", "ours").unwrap().number;
        let theirs = claims.take("127.0.0.1:2", "theirs").unwrap().number;
        // Only root can give a file away.
        let path = claims.directory().join(format!("{theirs:08}"));
        let is_root = std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0);
        if !is_root || std::os::unix::fs::chown(path, Some(1000), None).is_err() {
            return eprintln!("skipped: a file of another user is made by root alone");
        }
        for plaintext in [false, true] {
            let first = Address::parse("127.0.0.1:1").plaintext(plaintext);
            let now = Whereabouts::until_moved(first, claims.clone(), number).now();
            assert_eq!(now.to_string(), "https://127.0.0.1:2");
        }
    }

    #[test]
    fn what_is_found_in_a_directory_is_not_called_in_clear_by_its_own_word() {
        let encrypts = |address: Address| address.encrypts("10.0.0.4".parse().unwrap());
        assert!(encrypts(Address::found("http://10.0.0.4:7", false)));
        assert!(!encrypts(Address::found("http://10.0.0.4:7", true)));
        assert!(Address::parse("127.0.0.1:7").encrypted().encrypts("127.0.0.1".parse().unwrap()));
    }

    #[test]
    fn an_address_is_written_as_it_is_read() {
        for text in ["node0:29400", "http://node0:29400", "https://[::1]:29400"] {
            assert_eq!(Address::parse(text).to_string(), text);
        }
        assert_eq!(Address::parse("https://[::1]:29400").host(), "::1");
        let of = |host| Address::of(host, 7).to_string();
        assert_eq!(
            ["n3", "10.0.0.4", "fd00::4", "[::1]"].map(of),
            ["n3:7", "10.0.0.4:7", "[fd00::4]:7", "[::1]:7"]
        );
        assert_eq!(Address::parse("node0:7").plaintext(true).to_string(), "http://node0:7");
    }
}
