//! Many messages around the ring, of which any, some or all are waited for.

use phalanx::{Comm, Request, Result};

const COUNT: usize = 256;

pub fn run(comm: &Comm) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    // Sends, then receives.
    let start = || -> Result<Vec<Request<Vec<usize>>>> {
        let sends = (0..COUNT).map(|number| comm.start_send(vec![number], next));
        let receives = (0..COUNT).map(|_| comm.start_recv(vec![0], previous));
        sends.chain(receives).collect()
    };

    let send = comm.start_send(vec![100], rank)?;
    assert_eq!(comm.start_recv(vec![0], rank)?.wait()?, [100]);
    send.wait()?;

    let (mut requests, mut complete) = (start()?, 0);
    while let Some((_, result)) = Request::wait_any(&mut requests) {
        result?;
        complete += 1;
    }
    assert_eq!(complete, 2 * COUNT);

    let (mut requests, mut complete) = (start()?, 0);
    while !requests.is_empty() {
        for (_, result) in Request::wait_some(&mut requests) {
            result?;
            complete += 1;
        }
        assert_eq!(requests.len(), 2 * COUNT - complete);
    }

    let buffers = Request::wait_all(start()?).into_iter().collect::<Result<Vec<_>>>()?;
    let received: Vec<usize> = buffers[COUNT..].concat();
    assert_eq!(received, (0..COUNT).collect::<Vec<_>>());
    Ok(())
}
