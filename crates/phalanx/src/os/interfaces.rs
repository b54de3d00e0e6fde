//! The network interfaces of this host.

/// The interfaces that are up, each with its addresses: `eth0 (10.0.0.1, fe80::1)`. Empty where they cannot be listed.
#[cfg(target_os = "linux")]
pub(crate) fn interfaces() -> Vec<String> {
    let mut found: Vec<(String, Vec<String>)> = Vec::new();
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: a place for the list, which `freeifaddrs` takes back below.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Vec::new();
    }
    let mut next = first;
    // SAFETY: an entry of the list, or null; the list is freed only afterwards.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: the address of this entry, or null; its name ends with a zero.
        let (address, name) =
            unsafe { (address_of(entry.ifa_addr), std::ffi::CStr::from_ptr(entry.ifa_name)) };
        let is_up = entry.ifa_flags & libc::IFF_UP as u32 != 0;
        let Some(address) = address.filter(|_| is_up) else { continue };
        let (name, address) = (name.to_string_lossy().into_owned(), address.to_string());
        match found.iter_mut().find(|(known, _)| *known == name) {
            Some((_, addresses)) => addresses.push(address),
            None => found.push((name, vec![address])),
        }
    }
    // SAFETY: the list from above, which nothing uses any more.
    unsafe { libc::freeifaddrs(first) };
    found.into_iter().map(|(name, addresses)| format!("{name} ({})", addresses.join(", "))).collect()
}

/// The IP address of a socket address, if it has one.
///
/// # Safety
/// The pointer is null, or that of a socket address as long as its family says.
#[cfg(target_os = "linux")]
unsafe fn address_of(address: *const libc::sockaddr) -> Option<std::net::IpAddr> {
    // SAFETY: by this function's contract.
    let family = i32::from(unsafe { address.as_ref() }?.sa_family);
    match family {
        libc::AF_INET => {
            // SAFETY: an address of this family is one of these.
            let address = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(std::net::Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: an address of this family is one of these.
            let address = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(std::net::Ipv6Addr::from(address.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

/// Not listed on this system.
#[cfg(not(target_os = "linux"))]
pub(crate) fn interfaces() -> Vec<String> {
    Vec::new()
}
