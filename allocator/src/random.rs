//! Random bytes, for names and secrets. They take no part in any placement decision (rule D1).

use rustix::rand::{GetRandomFlags, getrandom};

use crate::{Error, Result};

/// `N` bytes from the system's random source, which nobody can guess.
pub fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::system("getrandom", error)),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    #[test]
    fn random_bytes_differ() {
        assert_ne!(super::random_bytes::<32>().unwrap(), super::random_bytes::<32>().unwrap());
    }
}
