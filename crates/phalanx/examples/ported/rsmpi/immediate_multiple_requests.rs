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

    let mut requests: Vec<_> = start()?.into_iter().map(Some).collect();
    let mut complete = vec![false; 2 * COUNT];
    while let Some((place, result)) = Request::wait_any(&mut requests) {
        result?;
        complete[place] = true;
    }
    assert_eq!(complete, [true; 2 * COUNT]);

    let mut requests: Vec<_> = start()?.into_iter().map(Some).collect();
    let mut complete = 0;
    while complete < 2 * COUNT {
        for (_, result) in Request::wait_some(&mut requests) {
            result?;
            complete += 1;
        }
        assert_eq!(requests.iter().flatten().count(), 2 * COUNT - complete);
    }

    let buffers = Request::wait_all(start()?)?;
    let received: Vec<usize> = buffers[COUNT..].concat();
    assert_eq!(received, (0..COUNT).collect::<Vec<_>>());
    Ok(())
}
