"""What an agent asks of zeroplan: tools with small answers, and the server that offers them by the Model Context Protocol."""
